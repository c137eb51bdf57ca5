"""Fetching over real sockets; 127.0.0.1 is reachable only where a test's own check allows it."""

import asyncio
import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import RequestError, UsageError
from firstlight.inputs.images.addresses import is_public_address, resolve_host
from firstlight.inputs.images.fetch import RemoteImages
from firstlight.inputs.images.policy import ImagePolicy, parse_hosts

WHERE = "messages[0].content[0].image_url"
HERE = "127.0.0.1"
TLS = Path(__file__).parents[2] / "data" / "inputs" / "tls"


def fetcher(
    pictures, *, hosts=None, addresses=(HERE,), check=HERE.__eq__, certificates=None, **limits
):
    """Fetches from the test's server: names resolve to `addresses`, `check` judges them."""

    async def resolve(host, port):
        assert host.endswith(".test"), host
        return list(addresses)

    allowed = hosts or (f"pictures.test:{pictures.port}",)
    return RemoteImages(
        ImagePolicy(allowed_hosts=allowed, **limits),
        resolve=resolve,
        may_connect=check,
        certificates=certificates,
    )


async def refusal(remote, url):
    with pytest.raises(RequestError) as caught:
        await remote.fetch(url, WHERE)
    assert caught.value.parameter == WHERE
    return caught.value


async def test_an_allowed_host_is_asked_by_name(pictures, encoded):
    url = pictures.add("/a.png?size=1", encoded())
    assert await fetcher(pictures).fetch(url + "#part", WHERE) == encoded()
    (head,) = pictures.requests
    lines = head.lower().split("\r\n")
    assert lines[0] == "get /a.png?size=1 http/1.1"
    assert f"host: pictures.test:{pictures.port}" in lines
    assert "accept-encoding: identity" in lines and "cookie" not in head.lower()


async def test_an_image_goes_from_http_to_patches(pictures, loader, part, encoded):
    url = pictures.add("/a.png", encoded())
    one = loader(fetcher(pictures), allowed_hosts=(f"pictures.test:{pictures.port}",))
    images = await one.load([part(url), part(encoded(), 1), part(url, 2)])
    assert images[0] is images[1] is images[2]
    assert len(pictures.requests) == 1


async def test_loopback_is_refused_unless_a_check_allows_it(pictures, encoded):
    url = pictures.add("/a.png", encoded())
    for addresses in ([HERE], ["93.184.216.34", HERE], ["::1"], ["::ffff:127.0.0.1"]):
        remote = fetcher(pictures, addresses=addresses, check=is_public_address)
        assert (await refusal(remote, url)).code == "image_fetch_refused"
    assert pictures.requests == []


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "0177.0.0.1", "2130706433", "[::1]", "0"]
)
async def test_names_of_this_machine_are_refused_with_the_real_resolver(pictures, host, encoded):
    pictures.add("/a.png", encoded())
    remote = RemoteImages(ImagePolicy(allowed_hosts=(f"*:{pictures.port}",)))
    problem = await refusal(remote, f"http://{host}:{pictures.port}/a.png")
    assert problem.code.startswith(("image_fetch_", "invalid_image_url"))
    assert pictures.requests == []


async def test_a_name_is_resolved_once_and_that_address_is_asked(pictures, encoded):
    """A name server that answers differently the second time changes nothing."""
    asked = []

    async def rebinding(host, port):
        asked.append(host)
        return [HERE] if len(asked) == 1 else ["10.0.0.1"]

    url = pictures.add("/a.png", encoded())
    policy = ImagePolicy(allowed_hosts=(f"pictures.test:{pictures.port}",))
    remote = RemoteImages(policy, resolve=rebinding, may_connect=HERE.__eq__)
    assert await remote.fetch(url, WHERE) == encoded()
    assert asked == ["pictures.test"]


async def test_the_next_address_is_tried_when_one_does_not_answer(pictures, encoded):
    url = pictures.add("/a.png", encoded())
    remote = fetcher(pictures, addresses=["127.0.0.2", HERE], check=lambda _: True)
    assert await remote.fetch(url, WHERE) == encoded()


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/a.png",
        "http://pictures.test/a.png",  # another port
        "https://pictures.test:1/a.png",
        "http://pictures.test.evil.test/a.png",
        "http://evilpictures.test/a.png",
        "http://user:secret@pictures.test/a.png",
        "http://user@pictures.test/a.png",
    ],
)
async def test_hosts_that_are_not_listed_are_refused(pictures, url):
    assert (await refusal(fetcher(pictures), url)).code == "image_fetch_refused"
    assert pictures.requests == []


@pytest.mark.parametrize(
    "url", ["http://", "http:///a", "//x", "http:x", "http://a:b/", "http://x/" + "x" * 9000]
)
async def test_malformed_addresses_are_refused(pictures, url):
    assert (await refusal(fetcher(pictures), url)).code == "invalid_image_url"


async def test_redirects_are_followed_within_their_number(pictures, encoded):
    for step in range(4):
        pictures.add(f"/{step}", status=302, location=f"/{step + 1}")
    pictures.add("/4", encoded())
    start = f"http://pictures.test:{pictures.port}"
    assert await fetcher(pictures, max_redirects=4).fetch(f"{start}/0", WHERE) == encoded()
    problem = await refusal(fetcher(pictures, max_redirects=3), f"{start}/0")
    assert "redirected more than 3 times" in str(problem)


@pytest.mark.parametrize(
    "location",
    [
        "http://other.test/a.png",
        "http://127.0.0.1/",
        "file:///etc/passwd",
        "http://user:pass@pictures.test/",
        "ftp://pictures.test/",
        "http://[",
    ],
)
async def test_each_redirect_is_checked_again(pictures, location):
    url = pictures.add("/a", status=307, location=location)
    problem = await refusal(fetcher(pictures), url)
    assert problem.code in ("image_fetch_refused", "invalid_image_url", "image_fetch_failed")
    assert len(pictures.requests) == 1


async def test_the_addresses_of_a_redirect_are_checked_again(pictures):
    url = pictures.add("/a", status=302, location="/b")
    answers = [[HERE], ["10.0.0.1"]]

    async def resolve(host, port):
        return answers.pop(0)

    policy = ImagePolicy(allowed_hosts=(f"pictures.test:{pictures.port}",))
    remote = RemoteImages(policy, resolve=resolve, may_connect=HERE.__eq__)
    assert "open internet" in str(await refusal(remote, url))
    assert len(pictures.requests) == 1


@pytest.mark.parametrize("status", [204, 304, 401, 404, 500])
async def test_another_status_is_an_error(pictures, status):
    url = pictures.add("/a", b"", status)
    assert str(status) in str(await refusal(fetcher(pictures), url))


async def test_too_many_bytes_are_refused_while_they_stream(pictures, encoded):
    announced = pictures.add("/a", b"x", content_length="1001")
    assert (await refusal(fetcher(pictures, max_bytes=1000), announced)).code == "image_too_large"
    sent = 0

    async def endless(writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    url = pictures.add("/b")
    pictures.answers["/b"] = endless
    problem = await refusal(fetcher(pictures, max_bytes=1_000_000), url)
    assert problem.code == "image_too_large" and sent < 50_000_000
    exact = pictures.add("/c", b"x" * 1000)
    assert len(await fetcher(pictures, max_bytes=1000).fetch(exact, WHERE)) == 1000


async def test_the_time_limit_covers_a_server_that_drips(pictures):
    async def drip(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    url = pictures.add("/a")
    pictures.answers["/a"] = drip
    problem = await refusal(fetcher(pictures, fetch_seconds=0.3), url)
    assert "did not arrive within 0.3 s" in str(problem)


async def test_the_time_limit_covers_a_name_server_that_is_silent():
    async def silent(host, port):
        await asyncio.sleep(60)

    remote = RemoteImages(ImagePolicy(allowed_hosts=("*",), fetch_seconds=0.1), resolve=silent)
    assert "did not arrive" in str(await refusal(remote, "http://pictures.test/a.png"))


async def test_broken_answers_and_unknown_names_are_errors(pictures):
    url = pictures.add("/short", b"abc", content_length="10")
    assert (await refusal(fetcher(pictures), url)).code == "image_fetch_failed"
    noise = pictures.add("/noise")
    pictures.answers["/noise"] = b"this is not http\r\n\r\n"
    assert (await refusal(fetcher(pictures), noise)).code == "image_fetch_failed"
    packed = pictures.add("/packed", b"abc", content_encoding="gzip")
    assert "compressed" in str(await refusal(fetcher(pictures), packed))
    assert (await refusal(fetcher(pictures, addresses=[]), url)).code == "image_fetch_failed"

    async def unknown(host, port):
        raise OSError("no such name")

    remote = RemoteImages(ImagePolicy(allowed_hosts=("*",)), resolve=unknown)
    assert "is not known" in str(await refusal(remote, "http://pictures.test/a.png"))
    with pytest.raises(OSError):
        await resolve_host("a" * 70 + ".test", 80)


async def test_proxies_of_the_environment_are_not_asked(pictures, monkeypatch, encoded):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    url = pictures.add("/a.png", encoded())
    assert await fetcher(pictures).fetch(url, WHERE) == encoded()


async def test_https_goes_to_the_checked_address_under_the_name_of_the_url(pictures, encoded):
    """The certificate must be that of the name, though the connection is made to an address."""
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    server = await asyncio.start_server(pictures.handle, HERE, 0, ssl=served)
    pictures.port = server.sockets[0].getsockname()[1]
    pictures.add("/a.png", encoded())
    trusted = ssl.create_default_context(cafile=TLS / "certificate.pem")
    limits = {"hosts": (f"*:{pictures.port}",)}
    remote = fetcher(pictures, certificates=trusted, **limits)
    name = f"pictures.test:{pictures.port}"
    assert await remote.fetch(f"https://{name}/a.png", WHERE) == encoded()
    for url, one in [
        (f"https://other.test:{pictures.port}/a.png", remote),
        (f"https://{name}/a.png", fetcher(pictures, **limits)),  # who issued it is not known
    ]:
        assert (await refusal(one, url)).code == "image_fetch_failed"
    pictures.add("/down", status=302, location=f"http://{name}/a.png")
    assert "https to http" in str(await refusal(remote, f"https://{name}/down"))
    server.close()


async def test_https_never_falls_back_to_http(pictures):
    pictures.add("/a.png", b"x")
    url = f"https://pictures.test:{pictures.port}/a.png"
    assert (await refusal(fetcher(pictures, fetch_seconds=0.5), url)).code == "image_fetch_failed"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "0.0.0.0",
        "100.64.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "198.18.0.1",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00::1",
        "ff02::1",
        "fec0::1",
        "2001:db8::1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2001:0:1::1",
        "not-an-address",
    ],
)
def test_addresses_that_are_not_of_the_open_internet(address):
    assert not is_public_address(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_of_the_open_internet(address):
    assert is_public_address(address)


def test_an_allow_list_names_hosts_ports_and_subdomains():
    policy = ImagePolicy(
        allowed_hosts=parse_hosts("A.example, *.b.example:8080,[::1]:90,c.example:443")
    )

    def allows(host, port, usual=80):
        return policy.allows(host, port, usual_port=usual)

    assert allows("a.example", 80) and allows("a.example", 443, 443)
    assert not allows("a.example", 8080) and not allows("x.a.example", 80)
    assert allows("x.b.example", 8080) and not allows("b.example", 8080)
    assert not allows("x.b.example", 80) and not allows("xb.example", 8080)
    assert allows("::1", 90) and allows("c.example", 443, 443) and not allows("c.example", 80)
    assert parse_hosts(" , ") == ()


@pytest.mark.parametrize(
    "text", ["http://a", "a/b", "u@a", "*a", "a.*", "a:0", "a:99999", "*.", "a b"]
)
def test_an_entry_that_is_no_host_is_refused(text):
    with pytest.raises(UsageError, match="image fetch host"):
        parse_hosts(text)


@given(st.text(max_size=40))
def test_any_list_is_read_or_refused(text):
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    assert all(host == host.strip().lower() for host in hosts)
