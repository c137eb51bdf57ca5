"""Owns what a service lets clients send and fetch as images, and how a refusal is worded.
It knows neither HTTP nor pixels.
"""

from dataclasses import dataclass

from firstlight.errors import RequestError, UsageError

ANY_HOST = "*"


@dataclass(frozen=True, kw_only=True)
class ImagePolicy:
    """Limits of one service. Without `allowed_hosts` nothing is ever fetched.

    `allowed_hosts` are lower-case names, `*.name` for all below a name, or `*`; each may end in
    `:port`, and stands for the scheme's own port otherwise. `max_bytes` limits one picture as it
    is sent, `max_pixels` its width times height, `max_images` and `max_tokens` (None: no limit)
    those of one request. `fetch_seconds` covers everything a fetch does, redirects included.
    """

    allowed_hosts: tuple[str, ...] = ()
    max_bytes: int = 10 * 1024**2
    max_pixels: int = 64_000_000
    max_images: int = 32
    max_tokens: int | None = None
    fetch_seconds: float = 10.0
    max_redirects: int = 3

    @property
    def fetches(self) -> bool:
        """Whether http(s) addresses are followed at all."""
        return bool(self.allowed_hosts)

    def allows(self, host: str, port: int, *, usual_port: int) -> bool:
        """Says whether a host may be asked at a port; `usual_port` is that of the scheme."""
        for entry in self.allowed_hosts:
            name, wanted = _split(entry)
            if port == (wanted or usual_port) and _covers(name, host):
                return True
        return False


def parse_hosts(text: str) -> tuple[str, ...]:
    """Reads a comma-separated allow-list. Raises UsageError for an entry that is no host name."""
    entries = [entry.strip().lower() for entry in text.split(",") if entry.strip()]
    for entry in entries:
        host, port = _split(entry)
        name = host.removeprefix("*.") if host != ANY_HOST else "any"
        if not name or set(name) & set("/@*? #\\") or (port is not None and not 0 < port < 65536):
            raise UsageError(
                f"image fetch host {entry!r} cannot be used; write a name like images.example.org, "
                "*.example.org, images.example.org:8080 or *"
            )
    return tuple(entries)


def image_error(where: str, problem: str, code: str = "invalid_image") -> RequestError:
    """The refusal of one image part; `where` names it, like messages[0].content[1].image_url."""
    return RequestError(f"{where}: {problem}", where, code)


def too_many_bytes(policy: ImagePolicy, where: str) -> RequestError:
    """The refusal of a picture whose file is too large."""
    return image_error(
        where, f"is larger than the {policy.max_bytes} bytes taken here", "image_too_large"
    )


def _covers(name: str, host: str) -> bool:
    if name.startswith("*."):
        return host.endswith(name[1:]) and len(host) > len(name) - 1
    return name in (ANY_HOST, host)


def _split(entry: str) -> tuple[str, int | None]:
    """Name and port; an IPv6 address stands in brackets when a port follows."""
    name, colon, digits = entry.rpartition(":")
    if colon and digits.isdecimal() and (":" not in name or name.endswith("]")):
        return name.strip("[]"), int(digits)
    return entry.strip("[]"), None
