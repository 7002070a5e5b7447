"""docs/json.md lists the fields that the verbs print, all of them and no others."""

import json
import re

import pytest
from json_page import PAGE, documented

from torchmig.commands._main import main
from torchmig.repo import JobName, Manifest, RankSection, Repository
from torchmig.repo.locks import Lock, LockKind


@pytest.fixture
def repo(tmp_path):
    repo = Repository.open(str(tmp_path / "repo"), create=True)
    for number in range(2):
        with repo.writer() as writer:
            stream = writer.stream("s", "file")
            stream.write(0, bytes([number]) * 1000)
            done = stream.close()
        ranks = [RankSection(0, "node", 1, [done])]
        repo.commit(Manifest(JobName("job"), "suspend", ranks=ranks))
    return repo


COMMANDS = {
    "init": ["init"],
    "snapshots": ["snapshots"],
    "show": ["show"],
    "ls": ["ls"],
    "ls --streams": ["ls", "--streams"],
    "stats": ["stats"],
    "check": ["check", "--read-data"],
    "forget": ["forget", "--keep-last", "1"],
    "prune": ["prune"],
    "rebuild-index": ["rebuild-index"],
    "tag": ["tag", "--add", "x"],
}


@pytest.mark.parametrize("section", [*COMMANDS, "diff", "copy", "unlock"])
def test_the_fields(section, repo, tmp_path, capsys):
    arguments = COMMANDS.get(section)
    if section == "diff":
        arguments = ["diff", *repo.snapshot_ids()]
    elif section == "copy":
        arguments = ["copy", "--to", str(tmp_path / "other")]
    elif section == "unlock":
        Lock.acquire(repo.store, LockKind.SHARED, "test")
        arguments = ["unlock", "--all"]
    assert main([*arguments, "--json", "--repo", repo.url]) == 0
    output = capsys.readouterr()
    try:
        found = json.loads(output.out)
    except json.JSONDecodeError:  # messages, one a line
        found = json.loads(output.out.splitlines()[0])
    if isinstance(found, list):
        found = found[0]
    expected = documented(section)
    if section == "forget":
        expected |= documented("snapshots")
    assert set(found) == expected
    for line in output.err.splitlines():  # progress, for the verbs that take long
        message = json.loads(line)
        assert message["message_type"] == "status"
        assert {f"`{key}`" for key in message} <= set(re.findall(r"`[a-z_]+`", PAGE))


@pytest.mark.parametrize("verb", ["doctor", "config show", "version"])
def test_what_there_is_on_this_host(verb, capsys):
    main([*verb.split(), "--json"])  # the doctor may well find a host unfit
    found = json.loads(capsys.readouterr().out)
    assert set(found[0] if isinstance(found, list) else found) == documented(verb)
