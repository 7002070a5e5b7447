"""Bad input gets one clear sentence and its exit code, never a traceback."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace

import pytest
from job_processes import assert_nothing_left, job_of
from json_page import documented
from running import BIN, JOBS, ForkedRun, Run, by_rank, torchmig, unbroken

from torchmig.repo import Repository

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]

STEPS = "40"


@pytest.fixture(scope="module")
def suspended(tmp_path_factory):
    """A suspended job of two ranks, in a folder with its repository."""
    folder = tmp_path_factory.mktemp("suspended")
    for name in ("ring.py", "lean.py"):
        shutil.copy(JOBS / name, folder)
    run = Run(folder, "--nproc-per-node=2", f"--job={job_of(folder)}", "ring.py", STEPS)
    run.wait_for_step(5).suspend()
    (folder / "before").write_text(run.text)
    return folder


@pytest.fixture
def folder(suspended, tmp_path):
    """A copy that a test may damage; the packs are links."""
    copy = tmp_path / "copy"
    shutil.copytree(suspended, copy, copy_function=os.link)
    return copy


def repository(folder):
    return Repository.open(str(folder / "torchmig-repo"))


def refused(folder, code, pattern, *arguments, env=None):
    """Check that torchmig-run ends with the code and says one sentence that matches."""
    run = ForkedRun(folder, *arguments, env=env)
    assert run.wait() == code, run.errors
    sentences = [line for line in run.errors.splitlines() if line.startswith("torchmig-run: ")]
    assert len(sentences) == 1, run.errors
    assert re.search(pattern, sentences[0]), run.errors
    others = [line for line in run.errors.splitlines() if line != sentences[0]]
    assert all(line.startswith(("usage: ", " ", "torchmig: ")) for line in others), run.errors
    assert run.text == ""


def damage(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()  # the bytes are shared with other tests
    path.write_bytes(data)


def rewritten(folder, change):
    """Commit the snapshot again with a change, and return the new one's id."""
    with repository(folder) as repo:
        return repo.commit(change(repo.load("latest")))


def test_no_repository(tmp_path):
    refused(tmp_path, 10, "there is no repository at '.*/none'", "--restore=latest", "--repo=none")


def test_only_our_own_json_makes_errors_json(tmp_path):
    none = ("--restore=latest", "--repo=none")
    refused(tmp_path, 10, "there is no repository at '.*/none'", *none, "script.py", "--json")
    run = ForkedRun(tmp_path, *none, "--json", "script.py")
    assert run.wait() == 10
    message = json.loads(run.errors)
    assert (message["message_type"], message["code"]) == ("exit_error", 10)


def test_a_file_of_settings_that_is_wrong_is_refused_as_it_was_asked_for(tmp_path):
    env = {"TORCHMIG_CONFIG": str(tmp_path / "none.toml")}
    pattern = "cannot read the configuration file '.*/none.toml'"
    refused(tmp_path, 2, pattern, "script.py", "--json", env=env)
    run = ForkedRun(tmp_path, "--json", "script.py", env=env)
    assert run.wait() == 2
    assert json.loads(run.errors)["error"] == "UsageError"


def test_a_repository_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    refused(tmp_path, 2, "it is a file, not a folder", "--restore=latest", "--repo=file")


def test_no_such_snapshot(folder):
    refused(folder, 12, "no snapshot .*'0000000000'", "--restore=0000000000")
    refused(folder, 12, "no snapshot of job 'other'", "--restore=latest", "--job=other")


def test_an_ambiguous_snapshot(folder):
    """Until two ids begin with the same digit."""
    first = repository(folder).snapshot_ids()
    for number in range(40):
        rewritten(folder, lambda manifest, number=number: replace(manifest, tags=[f"t{number}"]))
    digits = [known[0] for known in repository(folder).snapshot_ids()]
    twice = next(digit for digit in digits if digits.count(digit) > 1)
    assert len(digits) > len(first)
    refused(folder, 12, f"'{twice}' .*(ambiguous|several)", f"--restore={twice}")


def test_a_changed_blob(folder):
    packs = sorted((folder / "torchmig-repo" / "data").rglob("*/*"), key=lambda p: p.stat().st_size)
    damage(packs[-1], packs[-1].stat().st_size // 3)
    refused(folder, 22, f"'{packs[-1].name[:8]}|{packs[-1].name[:8]}", "--restore=latest")
    assert_nothing_left(folder)


def test_a_truncated_manifest(folder):
    (snapshot_id,) = repository(folder).snapshot_ids()
    path = folder / "torchmig-repo" / "snapshots" / snapshot_id
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])
    refused(folder, 22, f"snapshot '{snapshot_id[:8]}' is damaged", f"--restore={snapshot_id[:9]}")


@pytest.mark.parametrize(
    ("name", "value"), [("torch", "2.0.1"), ("python", "3.9.0"), ("machine", "riscv64")]
)
def test_another_environment(folder, name, value):
    new = rewritten(
        folder,
        lambda manifest: replace(manifest, environment={**manifest.environment, name: value}),
    )
    refused(folder, 21, f"taken with {name} '{re.escape(value)}' and here is", f"--restore={new}")


def test_images_of_a_newer_criu(folder):
    def change(manifest):
        ranks = [replace(rank, state={**rank.state, "criu": "99.0"}) for rank in manifest.ranks]
        return replace(manifest, ranks=ranks)

    pattern = "taken with CRIU '99.0', whose images the older '[0-9.]+' cannot read"
    refused(folder, 21, pattern, f"--restore={rewritten(folder, change)}")


def test_a_missing_script(folder):
    launch = {"cwd": str(folder), "script": "gone.py"}
    new = rewritten(
        folder, lambda manifest: replace(manifest, launch={**manifest.launch, **launch})
    )
    refused(folder, 21, f"script '{folder}/gone.py' is missing", f"--restore={new}")


@pytest.mark.parametrize(
    ("needed", "pattern"),
    [
        ({"path": "/nonexistent/libfast.so", "size_bytes": 5}, "'/nonexistent/libfast.so' is miss"),
        ({"path": "/usr/bin/env", "size_bytes": 5}, "'/usr/bin/env' has [0-9]+ bytes and had 5"),
    ],
    ids=["missing", "changed"],
)
def test_a_library_that_is_not_as_it_was(folder, needed, pattern):
    def change(manifest):
        ranks = [
            replace(rank, state={**rank.state, "needs": [*rank.state["needs"], needed]})
            for rank in manifest.ranks
        ]
        return replace(manifest, ranks=ranks)

    refused(folder, 21, pattern, f"--restore={rewritten(folder, change)}")


def test_another_number_of_ranks(folder):
    pattern = "holds 2 ranks and this job has 3"
    refused(folder, 21, pattern, "--restore=latest", "--nproc-per-node=3")


@pytest.mark.parametrize("given", [("other.py", STEPS), ("ring.py", "41"), ("ring.py",)])
def test_another_script(folder, given):
    pattern = f"with the script '{' '.join(given)}': it was taken of 'ring.py {STEPS}'"
    refused(folder, 2, pattern, "--restore=latest", *given)


@pytest.mark.parametrize(
    "options",
    [
        ("--deadline=soon",),
        ("--deadline=-3",),
        ("--checkpoint-signal=NONE",),
        ("--term-action=faint",),
        ("--staging=many",),
    ],
    ids=lambda options: options[0],
)
def test_values_that_do_not_parse(tmp_path, options):
    name = options[0].split("=")[0]
    refused(tmp_path, 2, f"error: argument {name}.*: ", *options, JOBS / "report.py")


def test_a_variable_that_does_not_parse(tmp_path):
    refused(
        tmp_path, 2, "'TORCHMIG_DEADLINE': ", JOBS / "report.py", env={"TORCHMIG_DEADLINE": "soon"}
    )


@pytest.mark.parametrize("name", ["a/b", "..", "n" * 200])
def test_a_name_that_cannot_be_a_folder(tmp_path, name):
    refused(tmp_path, 2, "cannot be the name of a job", f"--job={name}", JOBS / "report.py")


def test_the_same_script_may_be_given(folder, suspended):
    """What the refusals above are measured against: this one works."""
    run = Run(suspended, "--restore=latest", "ring.py", STEPS).finish()
    before = (suspended / "before").read_text()
    assert by_rank(before, run.text) == unbroken(2, "ring.py", STEPS)


def test_a_job_runs_only_once(tmp_path):
    job = f"--job={job_of(tmp_path)}"
    first = Run(tmp_path, job, JOBS / "single.py", "100000", "inference").wait_for_step(1)
    refused(tmp_path, 11, "a job of this name runs here", job, JOBS / "single.py", "1", "training")
    first.signal(signal.SIGUSR1).wait_for("checkpointed into snapshot")
    refused(tmp_path, 11, "a job of this name runs here", "--restore=latest")
    first.wait_for_step(50)  # as if nothing had happened
    first.kill()


def test_a_runtime_folder_that_is_too_deep_for_sockets(tmp_path):
    deep = f"--runtime-dir={tmp_path / ('d' * 100)}"
    refused(tmp_path, 2, "too long for a socket .*--runtime-dir", deep, JOBS / "report.py")


def without_rights(*words):
    """Return a command line that runs a program without root's rights, but reading everything."""
    return [
        *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
        *("--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override"),
        *map(str, words),
    ]


def root_without_namespaces(*words):
    return ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all", *map(str, words)]


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [(without_rights, "this is not root"), (root_without_namespaces, "cannot make namespaces")],
    ids=["not root", "root without rights"],
)
def test_without_rights_the_job_runs_but_cannot_be_checkpointed(tmp_path, wrap, reason):
    runtime = tmp_path / "r"
    job = ("--job=poor", f"--runtime-dir={runtime}", "--nproc-per-node=2")
    command = wrap(BIN / "torchmig-run", *job, JOBS / "report.py", "a", "wait")
    run = Run(tmp_path, *command, program="/usr/bin/env")
    run.wait_for(r"^rank 0 waits").wait_for(r"^rank 1 waits")

    (status,) = json.loads(torchmig("ps", "--json", "--runtime-dir", runtime).stdout)
    assert reason in status["unfit"]
    assert set(status) == documented("ps")
    for verb in ("suspend", "checkpoint"):
        answer = torchmig(verb, "poor", "--runtime-dir", runtime, check=False)
        assert answer.returncode == 20
        assert re.fullmatch(rf"torchmig: job 'poor' cannot be .*{reason}.*\n", answer.stderr)
    run.signal(signal.SIGUSR2).wait_for(rf"suspend refused: .*{reason}")

    run.signal(signal.SIGTERM)
    assert run.wait() == 1
    assert "rank 0 got SIGTERM" in run.text
    assert len(re.findall("this job cannot be checkpointed", run.errors)) == 1
    environment = json.loads(run.text.splitlines()[0].split(" ", 2)[2])["environment"]
    assert not [name for name in environment if name.startswith("TORCHMIG_RANK")]


def test_without_rights_there_is_no_restore(folder):
    command = without_rights(BIN / "torchmig-run", "--restore=latest")
    run = Run(folder, *command, program="/usr/bin/env")
    assert run.wait() == 20
    assert re.fullmatch("torchmig-run: cannot restore snapshot .* this is not root.*\n", run.errors)
    assert run.text == ""


def test_without_criu_requests_are_refused(tmp_path):
    run = Run(
        tmp_path,
        "--criu=/nonexistent/criu",
        f"--job={job_of(tmp_path)}",
        JOBS / "report.py",
        "wait",
    )
    run.wait_for(r"^rank 0 waits")
    answer = torchmig("suspend", job_of(tmp_path), check=False)
    assert answer.returncode == 20
    assert "/nonexistent/criu" in answer.stderr
    run.signal(signal.SIGTERM)
    assert run.wait() == 1
    assert len(re.findall("this job cannot be checkpointed", run.errors)) == 1


@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_a_job_that_does_not_run(tmp_path, verb):
    answer = torchmig(verb, "nothing", "--runtime-dir", tmp_path, check=False)
    assert answer.returncode == 2
    assert re.fullmatch("torchmig: no job 'nothing' runs on this host.*\n", answer.stderr)
