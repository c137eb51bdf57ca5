"""Owns the emulated device: where its compiled part lies, and what tests may ask of it.

Knows nothing of firstlight. `torch_musa` beside it is the face that programs see.
"""
