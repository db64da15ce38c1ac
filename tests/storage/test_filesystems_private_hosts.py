"""HTTP requests never lead into a network that is more private than the server that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.storage import filesystems
from kdpipes.storage.access import PrivateHostError
from kdpipes.storage.files import read_url, version_of
from kdpipes.storage.filesystems import check_hosts
from kdpipes.storage.remote import Span, read_range
from kdpipes.write import copy_to_local
from kdpipes.write.localize import FileLocalizer
from tests.http_server import Served, serving, tar

METADATA = "http://169.254.169.254/latest/meta-data/iam"


@pytest.fixture
def served() -> Iterator[Served]:
    """A server on this machine."""
    with serving() as has:
        yield has


@pytest.mark.parametrize(
    ("origin", "target", "is_allowed"),
    [
        ("93.184.216.34", "93.184.216.35", True),
        ("93.184.216.34", "10.0.0.3", False),
        ("93.184.216.34", "127.0.0.1", False),
        ("93.184.216.34", "::1", False),
        ("93.184.216.34", "::ffff:10.0.0.3", False),
        ("93.184.216.34", "169.254.169.254", False),
        ("2606:2800:220:1::1", "fd00:ec2::254", False),
        ("10.0.0.1", "192.168.0.1", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "10.0.0.3", True),
        ("127.0.0.1", "169.254.169.254", False),
        ("169.254.1.1", "169.254.169.254", False),
    ],
)
def test_a_redirect_leads_to_no_network_that_is_more_private(
    origin: str, target: str, is_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_allowed:
        with pytest.raises(PrivateHostError, match="'here' redirects to 'there', an address in a private network"):
            check_hosts("there", [target], "here", [origin])
        monkeypatch.setenv("KDPIPES_ALLOW_PRIVATE_HOSTS", "1")
    check_hosts("there", [target], "here", [origin])


def test_link_local_hosts_are_never_asked() -> None:
    check_hosts("store", ["10.0.0.3"])
    check_hosts("localhost", ["127.0.0.1", "::1"])
    in_ipv6 = ("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "fd00:ec2::254")
    for address in ("169.254.169.254", "fe80::1%eth0", "100.100.100.200", *in_ipv6):
        with pytest.raises(PrivateHostError, match=r"^'metadata' is an address in a private network"):
            check_hosts("metadata", ["93.184.216.34", address])


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "169.16689662"],
)
def test_no_notation_of_an_address_gets_around_the_check(host: str) -> None:
    with pytest.raises(Exception, match=r"' is an address in a private network; `KDPIPES_ALLOW_PRIVATE_HOSTS=1`"):
        read_url(f"http://{host}/latest/meta-data")


@pytest.mark.parametrize("host", ["localhost", "2130706433", "0177.1", "127.1", "0x7f000001"])
def test_other_notations_of_this_machine_are_not_link_local(served: Served, host: str) -> None:
    served.files["/a"] = b"heron"
    served.redirects["/b"] = served.url.replace("127.0.0.1", "2852039166") + "/a"
    assert filesystems._address_in(host) in (None, "127.0.0.1")
    with pytest.raises(Exception, match="'2852039166', an address in a private network"):
        read_url(f"{served.url}/b")


@pytest.mark.parametrize("place", ["redirect", "url"])
def test_readers_do_not_reach_link_local_addresses(served: Served, place: str, tmp_path: Path) -> None:
    served.redirects = {"/a.tar": METADATA}
    url = f"{served.url}/a.tar" if place == "redirect" else METADATA
    tries: list[Any] = [
        version_of,
        read_url,
        lambda url: read_range(Span(url, 0, 5)),
        lambda url: len(kdp.open_shards(url)),
        lambda url: list(kdp.stream_shards(url)),
        lambda url: kdp.from_ids([url])[0]["x"],
        lambda url: FileLocalizer(tmp_path)(url),
        lambda url: kdp.open_cache(url),
        lambda url: copy_to_local(url, tmp_path / "copy"),
        lambda url: len(kdp.open_shards(f"tar://x.tar::{url}")),
    ]
    for read in tries:
        with pytest.raises(Exception, match=r"169\.254\.169\.254'(,| is) an address in a private network; `KDP"):
            read(url)


def test_a_redirect_to_the_same_network_is_followed(served: Served) -> None:
    served.files["/b.tar"] = tar("a")
    served.redirects["/a.tar"] = f"{served.url}/b.tar"
    assert len(list(kdp.stream_shards(f"{served.url}/a.tar"))) == 10


def test_a_listing_leads_to_no_other_host(served: Served) -> None:
    page = f'<a href="{METADATA}/b.jpg">x</a> <a href="http://example.com/a/b.jpg">x</a> <a href="heron/1.jpg">x</a>'
    served.files = {"/birds": page.encode(), "/birds/heron/1.jpg": b"1"}
    served.headers["Content-Type"] = "text/html"
    paths = kdp.open_shards(f"{served.url}/birds/*.tar")
    with pytest.raises(FileNotFoundError, match="No file matches"):
        len(paths)
    with pytest.raises(Exception, match="folder"):  # only `heron/` would be below, and is a link to a file
        len(kdp.image_folder(f"{served.url}/other"))
