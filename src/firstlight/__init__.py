"""firstlight: bring a just-released giant model up on a cluster of accelerators and serve it."""

__version__ = "0.1.0"
