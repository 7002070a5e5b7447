"""The verbs over a repository, as a user calls them."""

import json
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from torchmig.commands._main import main
from torchmig.repo import JobName, Manifest, RankSection, Repository
from torchmig.repo.locks import Lock, LockKind

pytest_plugins = ["store_fixtures"]
MIB = 1 << 20
START = datetime(2026, 1, 1, tzinfo=UTC)


def at(hours):
    return (START + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def noise(seed, size=MIB):
    return random.Random(seed).randbytes(size)


def save(repo, job="train", hours=0, seed=0, host="node0"):
    """A snapshot of two ranks: one GPU block that both have, and host pages of their own."""
    ranks = []
    with repo.writer() as writer:
        for rank in range(2):
            streams = []
            for name, kind, content in (
                ("pages-1.img", "host-pages", noise(10 + rank) + noise((seed, rank).__repr__())),
                ("block0", "gpu-block", noise(20, 4 * MIB)),
            ):
                stream = writer.stream(f"rank{rank}/{name}", kind)
                stream.write(0, content)
                streams.append(stream.close())
            ranks.append(RankSection(rank, host, 100 + rank, streams, {"step": 7, "key": b"\x01"}))
    return repo.commit(
        Manifest(
            JobName(job, f"{job}-id"),
            "checkpoint",
            created=at(hours),
            launch={"argv": ["train.py", "--lr", "0.1"], "world_size": 2},
            environment={"torch": "2.13"},
            nodes=[{"name": host}],
            ranks=ranks,
            report={"t_cut_seconds": 0.5},
            store_keys={"key": b"\x00\xff"},
        )
    )


@pytest.fixture
def repo(tmp_path):
    return Repository.open(str(tmp_path / "repo"), create=True)


@pytest.fixture
def torchmig(repo, capsys):
    """Return a function that runs a verb and returns (exit code, stdout, stderr)."""

    def run(*arguments, url=repo.url):
        capsys.readouterr()
        code = main([*arguments, "--repo", url])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def as_json(torchmig):
    def run(*arguments, lines=False, **options):
        code, out, err = torchmig(*arguments, "--json", **options)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()] if lines else json.loads(out)

    return run


def test_init(torchmig, as_json, tmp_path):
    url = str(tmp_path / "new" / "place")
    assert torchmig("snapshots", url=url)[0] == 10
    assert as_json("init", url=url) == {"repository": url}
    assert as_json("init", url=url) == {"repository": url}
    assert as_json("snapshots", url=url) == []
    (tmp_path / "file").write_text("")
    code, _, err = torchmig("init", url=str(tmp_path / "file"))
    assert code == 2
    assert "is a file" in err
    assert err.count("\n") == 1


def test_snapshots(repo, torchmig, as_json):
    ids = [
        save(repo, hours=0),
        save(repo, "other", hours=30, seed=1, host="b"),
        save(repo, hours=60, seed=2),
    ]
    assert [each["id"] for each in as_json("snapshots")] == ids
    first = as_json("snapshots")[0]
    assert first["job"] == {"name": "train", "id": "train-id"}
    assert first["world_size"] == 2
    assert first["size_bytes"] == 12 * MIB
    assert first["created"] == at(0)
    for arguments, expected in (
        (["--job", "train"], [0, 2]),
        (["--job", "other-id"], [1]),
        (["--host", "b"], [1]),
        (["--latest", "1"], [2]),
        (["--since", "2026-01-02"], [1, 2]),
        (["--before", "2026-01-02"], [0]),
        (["--tag", "none"], []),
    ):
        found = [each["id"] for each in as_json("snapshots", *arguments)]
        assert found == [ids[n] for n in expected], arguments
    groups = as_json("snapshots", "--group-by", "job", "--latest", "1")
    assert [(g["group"], g["snapshots"][0]["id"]) for g in groups] == [
        ({"job": "train"}, ids[2]),
        ({"job": "other"}, ids[1]),
    ]
    code, out, _ = torchmig("snapshots")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["id", *(i[:8] for i in ids)]
    assert "job train" in torchmig("snapshots", "--group-by", "job")[1]


def test_show(repo, torchmig, as_json):
    snapshot_id = save(repo)
    document = as_json("show")
    assert document == as_json("show", snapshot_id[:10])
    assert document["id"] == snapshot_id
    assert document["launch"]["argv"] == ["train.py", "--lr", "0.1"]
    assert document["ranks"][1]["state"] == {"step": 7, "key": "01"}
    assert document["store_keys"] == {"key": "00ff"}
    text = torchmig("show")[1]
    for word in (snapshot_id, "train (train-id)", "t_cut_seconds", "on node0, pid 101"):
        assert word in text


def test_ls(repo, torchmig, as_json):
    save(repo)
    rows = {(row["rank"], row["kind"]): row for row in as_json("ls")}
    assert set(rows) == {(rank, kind) for rank in (0, 1) for kind in ("gpu-block", "host-pages")}
    assert rows[0, "gpu-block"]["shared_bytes"] == 4 * MIB
    assert rows[0, "host-pages"]["shared_bytes"] == 0
    stored = rows[0, "gpu-block"]["stored_bytes"], rows[1, "gpu-block"]["stored_bytes"]
    assert sorted(stored) == [0, 4 * MIB]
    streams = as_json("ls", "--streams")
    assert [each["name"] for each in streams][:2] == ["rank0/pages-1.img", "rank0/block0"]
    assert "gpu-block" in torchmig("ls")[1]
    assert "rank1/block0" in torchmig("ls", "latest", "--streams")[1]


def test_diff(repo, torchmig, as_json):
    first, second = save(repo, seed=1), save(repo, hours=1, seed=2)
    rows = as_json("diff", first[:12], second)
    pages = next(row for row in rows if (row["rank"], row["kind"]) == (0, "host-pages"))
    assert (pages["removed_bytes"], pages["added_bytes"], pages["common_bytes"]) == (MIB,) * 3
    total = rows[-1]
    assert (total["rank"], total["added_bytes"], total["common_bytes"]) == (None, 2 * MIB, 10 * MIB)
    assert "all" in torchmig("diff", first, "latest")[1]


def test_stats(repo, torchmig, as_json):
    save(repo, seed=1)
    second = save(repo, hours=1, seed=2)
    found = as_json("stats")
    assert found["snapshots"] == 2
    assert found["restore_bytes"] == 24 * MIB
    assert found["unique_bytes"] == 10 * MIB
    assert found["deduplication_ratio"] == pytest.approx(2.4)
    assert 10 * MIB <= found["stored_bytes"] < found["repository_bytes"] < 10.1 * MIB
    assert as_json("stats", second[:9])["unique_bytes"] == 8 * MIB
    assert "2.40x" in torchmig("stats")[1]


def test_check(repo, torchmig, as_json, tmp_path):
    snapshot_id = save(repo)
    for arguments in ([], ["--read-data"], ["--read-data-subset", "50%"]):
        summary = as_json("check", *arguments, lines=True)[-1]
        assert summary["message_type"] == "summary"
        assert summary["problems"] == 0
    assert as_json("check", "--read-data-subset", "1/1", lines=True)[-1]["read_packs"] == 2
    for bad in ("0%", "x", "3/2", "101%"):
        assert torchmig("check", "--read-data-subset", bad)[0] == 2
    pack = max((tmp_path / "repo" / "data").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[5] ^= 1
    pack.write_bytes(content)
    assert torchmig("check")[0] == 0
    code, out, _ = torchmig("check", "--read-data")
    assert code == 22
    assert pack.name in out
    assert snapshot_id[:8] in out
    code, out, _ = torchmig("check", "--read-data", "--json")
    problem = json.loads(out.splitlines()[0])
    assert code == 22
    assert problem["message_type"] == "problem"
    assert problem["object"].endswith(pack.name)
    assert problem["snapshots"] == [snapshot_id]
    pack.unlink()
    assert torchmig("check")[0] == 22


def test_forget_by_rule_and_prune(repo, torchmig, as_json):
    ids = [save(repo, hours=n, seed=n) for n in range(5)]
    dry = as_json("forget", "--keep-last", "2", "--dry-run")
    assert [each["kept"] for each in dry] == [False, False, False, True, True]
    assert len(as_json("snapshots")) == 5
    code, out, _ = torchmig("forget", "--keep-last", "1", "--keep-within", "1h", "--prune")
    assert code == 0
    assert "freed" in out
    assert [each["id"] for each in as_json("snapshots")] == ids[3:]
    assert as_json("check", "--read-data", lines=True)[-1]["problems"] == 0
    assert torchmig("forget")[0] == 2
    assert torchmig("forget", "--keep-last", "-1")[0] == 2
    assert torchmig("forget", ids[3], "--keep-last", "1")[0] == 2


def test_forget_by_id(repo, torchmig, as_json, tmp_path):
    ids = [save(repo, hours=n, seed=n) for n in range(3)]
    assert torchmig("forget", ids[1][:12])[0] == 0
    assert [each["id"] for each in as_json("snapshots")] == [ids[0], ids[2]]
    assert torchmig("forget", ids[1])[0] == 12
    (tmp_path / "repo" / "snapshots" / ids[0]).write_bytes(b"damage")
    assert torchmig("prune")[0] == 22  # it may have used anything
    assert torchmig("forget", ids[0])[0] == 0
    assert torchmig("prune")[0] == 0


def test_prune(repo, torchmig, as_json):
    save(repo, seed=1)
    repo.forget(save(repo, hours=1, seed=2))
    dry = as_json("prune", "--dry-run", "--max-unused", "0%", lines=True)[-1]
    assert dry["dry_run"]
    assert dry["freed_bytes"] >= 2 * MIB
    before = as_json("stats")["repository_bytes"]
    done = as_json("prune", "--max-unused", "0%", lines=True)[-1]
    assert before - as_json("stats")["repository_bytes"] >= done["freed_bytes"] - 100_000
    assert as_json("prune", lines=True)[-1]["deleted_packs"] == 0
    assert torchmig("prune", "--max-unused", "lots")[0] == 2


def test_locked(repo, torchmig, as_json):
    lock = Lock.acquire(repo.store, LockKind.SHARED, "write")
    code, _, err = torchmig("prune")
    assert code == 11
    assert "torchmig unlock" in err
    assert torchmig("unlock")[0] == 0
    assert torchmig("prune")[0] == 11  # it is alive
    assert [each["removed"] for each in as_json("unlock")] == [False]
    assert [each["removed"] for each in as_json("unlock", "--all")] == [True]
    assert torchmig("prune")[0] == 0
    assert "no locks" in torchmig("unlock")[1]
    assert not lock.refresh()


def test_tag(repo, torchmig, as_json):
    first = save(repo)
    changed = as_json("tag", first[:8], "--add", "good", "--add", "step-7")
    assert changed["previous_id"] == first
    assert changed["tags"] == ["good", "step-7"]
    (listed,) = as_json("snapshots", "--tag", "good")
    assert listed["id"] == changed["id"] != first
    assert as_json("tag", "--remove", "step-7")["tags"] == ["good"]
    assert as_json("show")["original"] == first
    save(repo, hours=1, seed=1)
    kept = as_json("forget", "--keep-tag", "good", "--dry-run")
    assert [each["kept"] for each in kept] == [True, False]
    unchanged = as_json("tag", "--add", "x", "--remove", "x")
    assert unchanged["id"] == unchanged["previous_id"]


def test_copy_there_and_back(repo, torchmig, as_json, store_address, tmp_path):
    ids = [save(repo, hours=n, seed=n) for n in range(2)]
    as_json("init", url=store_address)
    lines = as_json("copy", ids[0], "--to", store_address, lines=True)
    assert lines[0]["id"] == ids[0]
    assert lines[0]["sent_bytes"] >= 8 * MIB
    lines = as_json("copy", "--to", store_address, lines=True)
    assert [line.get("was_there") for line in lines[:2]] == [True, False]
    assert lines[1]["sent_bytes"] < 2.1 * MIB
    assert as_json("check", "--read-data", url=store_address, lines=True)[-1]["problems"] == 0
    back = str(tmp_path / "back")
    assert torchmig("copy", "--to", back, url=store_address)[0] == 0
    assert [each["id"] for each in as_json("snapshots", url=back)] == ids
    returned = Repository.open(back)
    snapshot = returned.load(ids[1])
    with returned.reader() as reader:
        assert reader.read(snapshot.streams[1]) == noise(20, 4 * MIB)


def test_copy_does_not_spread_damage(repo, torchmig, tmp_path):
    save(repo)
    pack = max((tmp_path / "repo" / "data").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[5] ^= 1
    pack.write_bytes(content)
    code, _, err = torchmig("copy", "--to", str(tmp_path / "copy"))
    assert code == 22
    assert pack.name in err
    assert Repository.open(str(tmp_path / "copy")).snapshots() == []


def test_bad_ids_get_one_sentence(repo, torchmig, monkeypatch):
    for n in range(17):
        repo.commit(Manifest(JobName("train"), "suspend", created=at(n)))
    digits = [snapshot_id[0] for snapshot_id in repo.snapshot_ids()]
    ambiguous = next(digit for digit in digits if digits.count(digit) > 1)
    for reference, why in (("zzz", "no snapshot"), (ambiguous, "ambiguous"), ("", "no snapshot")):
        for verb in ("show", "ls", "forget"):
            code, out, err = torchmig(verb, reference)
            assert code == 12
            assert out == ""
            assert why in err
            assert err.count("\n") == 1
    assert torchmig("show", "--job", "nobody")[0] == 12
    monkeypatch.setenv("TORCHMIG_JSON", "1")
    code, _, err = torchmig("show", "zzz")
    assert code == 12
    assert json.loads(err)["code"] == 12


def test_truncated_manifest(repo, torchmig, tmp_path):
    first, second = save(repo), save(repo, hours=1, seed=1)
    path = tmp_path / "repo" / "snapshots" / second
    path.write_bytes(path.read_bytes()[:100])
    code, _, err = torchmig("show", second[:8])
    assert code == 22
    assert second[:8] in err
    code, out, _ = torchmig("snapshots")
    assert code == 0
    assert first[:8] in out
    assert second[:8] not in out
    assert torchmig("check")[0] == 22


def test_a_manifest_of_a_later_version_is_refused_by_name(repo, torchmig, tmp_path, monkeypatch):
    save(repo)
    monkeypatch.setattr("torchmig.repo.manifest.VERSION", 2)
    newer = replace(repo_manifest(), version=2).encode()
    monkeypatch.undo()
    from torchmig.repo.blob import hash_of

    name = hash_of(newer).hex()
    (tmp_path / "repo" / "snapshots" / name).write_bytes(newer)
    code, _, err = main_error(["show", name, "--repo", repo.url])
    assert code == 21
    assert "version 2" in err
    assert "upgrade torchmig" in err


def repo_manifest():
    return Manifest(JobName("later"), "suspend", created=at(0))


def main_error(arguments):
    import contextlib
    import io

    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, "", err.getvalue()


def test_every_verb_explains_itself(capsys):
    for verb in (
        *("init", "snapshots", "show", "ls", "diff", "stats", "check", "forget"),
        *("prune", "copy", "unlock", "tag", "rebuild-index"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert "--json" in out
        assert "exit codes" in out.lower()


def test_default_repository_is_in_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert (tmp_path / "torchmig-repo" / "config").is_file()
    monkeypatch.setenv("TORCHMIG_REPO", str(tmp_path / "torchmig-repo"))
    assert main(["snapshots", "--json"]) == 0
    assert Path(tmp_path / "torchmig-repo").is_dir()
    capsys.readouterr()


def test_rebuild_index(repo, torchmig, as_json, tmp_path):
    save(repo)
    folder = tmp_path / "repo" / "index"
    for damaged in (True, False):
        (index,) = folder.iterdir()
        if damaged:
            index.write_bytes(index.read_bytes()[:-1])
        else:
            index.unlink()
        assert torchmig("check")[0] == 22
        assert torchmig("ls")[0] == 22
        assert as_json("rebuild-index", lines=True)[-1]["packs"] == 2
        assert as_json("check", "--read-data", lines=True)[-1]["problems"] == 0
        assert len(list(folder.iterdir())) == 1
    pack = max((tmp_path / "repo" / "data").rglob("*"), key=lambda path: path.stat().st_size)
    whole = pack.read_bytes()
    for bad in (whole[:-1], whole[:100], whole[5:], b"", whole[:-50] + bytes(50)):
        pack.write_bytes(bad)
        code, out, _ = torchmig("rebuild-index")
        assert code == 22
        assert pack.name in out
    pack.write_bytes(whole)
    assert torchmig("rebuild-index")[0] == 0
    assert torchmig("check", "--read-data")[0] == 0
    lock = Lock.acquire(repo.store, LockKind.SHARED, "write")
    assert torchmig("rebuild-index")[0] == 11
    lock.release()


def test_prune_brings_small_packs_together(repo, as_json):
    for number in range(12):
        with repo.writer() as writer:
            streams = []
            for name in ("a", "b"):
                stream = writer.stream(name, "host-pages")
                stream.write(0, noise((number, name).__repr__(), 700_000))
                streams.append(stream.close())
        ranks = [RankSection(0, "node", 1, streams)]
        repo.commit(Manifest(JobName("train"), "suspend", created=at(number), ranks=ranks))
    assert as_json("check", lines=True)[-1]["packs"] == 24  # data and trees of each
    report = as_json("prune", lines=True)[-1]
    assert (report["repacked_packs"], report["deleted_packs"]) == (24, 24)
    summary = as_json("check", "--read-data", lines=True)[-1]
    assert (summary["packs"], summary["problems"], summary["unused_objects"]) == (2, 0, 0)
    assert as_json("prune", lines=True)[-1]["deleted_packs"] == 0
    snapshot = repo.load("latest")
    with Repository.open(repo.url).reader() as reader:
        assert reader.read(snapshot.streams[1]) == noise((11, "b").__repr__(), 700_000)
