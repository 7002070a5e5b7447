"""Every kind of store keeps the same contract."""

import os
import secrets
import threading

import pytest
from waiting import wait_until

from torchmig.errors import ObjectMissingError, StoreError
from torchmig.store import open_store

pytest_plugins = ["store_fixtures"]


def test_the_place_is_made_on_request_only(store_address):
    place = open_store(store_address)
    if "s3://" not in store_address or "bucket-" in store_address:
        assert not place.exists()
    place.create()
    assert place.exists()
    place.create()
    assert list(place.list("")) == []


def test_whole_objects_and_ranges(store):
    content = secrets.token_bytes(3_000_000)
    store.put("data/ab/abcd", [content[:10], memoryview(content)[10:1000], content[1000:]])
    assert store.get("data/ab/abcd") == content
    assert store.get("data/ab/abcd", 5) == content[5:]
    assert store.get("data/ab/abcd", 999_999, 7) == content[999_999:1_000_006]
    assert store.get("data/ab/abcd", len(content) - 3, 100) == content[-3:]
    assert store.get("data/ab/abcd", len(content) + 5, 100) == b""
    assert store.get("data/ab/abcd", 5, 0) == b""


def test_empty_object_and_many_parts(store):
    store.put("empty", [])
    assert store.get("empty") == b""
    parts = [bytes([n % 251]) * (n % 3) for n in range(5000)]
    store.put("many", parts)
    assert store.get("many") == b"".join(parts)


def test_put_again_replaces(store):
    store.put("locks/a", [b"one"])
    store.put("locks/a", [b"two!"])
    assert store.get("locks/a") == b"two!"


def test_missing(store):
    with pytest.raises(ObjectMissingError):
        store.get("data/no/nothing")
    with pytest.raises(ObjectMissingError):
        store.get("data/no/nothing", 5, 5)
    store.delete("data/no/nothing")


def test_what_will_be_read_may_be_said(store):
    content = secrets.token_bytes(100_000)
    store.put("data/a", [content])
    for name, start, size in [("data/a", 10, 1000), ("data/a", 99_000, 5000), ("data/b", 0, 10)]:
        store.expect(name, start, size)
    assert store.get("data/a") == content


def test_a_folder_has_the_kernel_fetch_what_will_be_read(tmp_path):
    store = open_store(str(tmp_path))
    store.put("data/a", [secrets.token_bytes(16 << 20)])
    with (tmp_path / "data" / "a").open("rb") as file:

        def is_cached(offset):
            try:
                return os.preadv(file.fileno(), [bytearray(100)], offset, os.RWF_NOWAIT) == 100
            except BlockingIOError:
                return False

        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(12 << 20):
            pytest.skip(f"{tmp_path} is on a file system that is all cache")
        store.expect("data/a", 12 << 20, 1 << 20)
        wait_until(lambda: is_cached((13 << 20) - 100))
        assert not is_cached(4 << 20)


def test_list_by_prefix(store):
    names = [f"data/{n:02x}/{n:04x}" for n in range(30)] + ["index/a", "indexes", "config"]
    for name in names:
        store.put(name, [name.encode()])
    assert {e.name: e.size_bytes for e in store.list("")} == {n: len(n) for n in names}
    assert sorted(e.name for e in store.list("data")) == names[:30]
    assert [e.name for e in store.list("data/03")] == ["data/03/0003"]
    assert [e.name for e in store.list("index")] == ["index/a"]
    assert list(store.list("snapshots")) == []
    times = [e.modified_seconds for e in store.list("")]
    assert 0 < max(times) - min(times) + 1 < 60


def test_listing_goes_beyond_one_page(store):
    names = {f"snapshots/{n:05d}" for n in range(1100)}
    for name in names:
        store.put(name, [b"x"])
    assert {entry.name for entry in store.list("snapshots")} == names


def test_delete(store):
    store.put("data/aa/1", [b"x"])
    store.put("data/aa/2", [b"y"])
    store.delete("data/aa/1")
    assert [entry.name for entry in store.list("data")] == ["data/aa/2"]


@pytest.mark.parametrize("name", ["../x", "a/../b", "/etc/x", "a//b", "", "A", "a/.", "a\0b", "ü"])
def test_names_lead_nowhere_else(store, name):
    with pytest.raises(StoreError, match="object name"):
        store.put(name, [b"x"])
    with pytest.raises(StoreError, match="object name"):
        store.get(name)


def test_many_threads(store):
    contents = {f"data/{n:02x}/x": secrets.token_bytes(50_000) for n in range(40)}
    failures = []

    def work(names):
        try:
            for name in names:
                store.put(name, [contents[name]])
                assert store.get(name) == contents[name]
        except Exception as error:  # noqa: BLE001  (shown below)
            failures.append(error)

    names = list(contents)
    threads = [threading.Thread(target=work, args=(names[n::8],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(list(store.list("data"))) == 40


def test_the_same_object_by_several_writers(store):
    """Content-named objects may be written at once by nodes that know nothing of one another."""
    content = secrets.token_bytes(500_000)
    threads = [
        threading.Thread(target=store.put, args=("data/aa/same", [content])) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("data/aa/same") == content


def test_two_addresses_do_not_see_one_another(store, store_address):
    other = open_store(store_address + "/deeper")
    other.create()
    other.put("config", [b"other"])
    assert [entry.name for entry in other.list("")] == ["config"]
    with pytest.raises(ObjectMissingError):
        store.get("config")
    other.close()
