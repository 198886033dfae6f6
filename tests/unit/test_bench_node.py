"""The benchmark of a node: parts that go well, fail and run out of time; what it plans for GPUs; the whole dry run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import bench_node
from scripts.bench_node import main
from scripts.node_health import ecc_problems, problems, read_facts, rounds_of
from scripts.node_parts import EXPECTED, Command, Node, Part, Told, parts_of, read_parity, read_weak

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_node.sh"


def command(code: str) -> Command:
    return Command([sys.executable, "-c", code])


def part(name: str, *codes: str, seconds: float = 60) -> Part:
    return Part(name, [[command(code)] for code in codes], seconds, lambda found: Told(found[-1].strip(), found))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs main with these parts: exit code, entry of the file, printed table, what went to stderr."""

    def run_main(parts: list[Part], *words: str):
        monkeypatch.setattr(bench_node, "parts_of", lambda node: parts)
        out = tmp_path / "node_cpu.json"
        code = main(["--dry-run", "--commit", "abc", "--out", str(out), *words])
        shown = capsys.readouterr()
        entry = json.loads(out.read_text())["2_gpus"] if out.exists() else None
        return code, entry, shown.out, shown.err

    return run_main


def test_parts_that_go_well(run) -> None:
    skipped = Part("none", [], 1, lambda found: Told("", found), "nothing to do here")
    code, entry, table, _ = run([part("one", "print(1)", "print('two')"), skipped])
    assert code == 0
    assert (entry["card"], entry["nproc"], entry["commit"]) == ("cpu", 2, "abc")
    assert [(one["status"], one["line"]) for one in entry["parts"].values()] == [
        ("ok", "two"),
        ("skipped", "nothing to do here"),
    ]
    lines = table.splitlines()
    assert lines[1].split()[:2] == ["one", "ok"] and lines[1].endswith("two")
    assert lines[2].split()[:2] == ["none", "skipped"]


def test_a_part_that_fails_is_told_and_the_others_run(run) -> None:
    failing = "import sys; print('error: no such link'); print('more'); sys.exit(3)"
    code, entry, table, err = run([part("bad", failing), part("good", "print('fine')")])
    assert code == 1
    assert entry["parts"]["bad"]["line"] == "exit code 3: error: no such link"
    assert entry["parts"]["good"]["status"] == "ok"
    assert "failed" in table and "exit code 3: error: no such link" in table
    assert "    more" in err


def test_figures_that_cannot_be_read_are_a_failure(run) -> None:
    def unreadable(found: list[str]) -> Told:
        raise KeyError("cases")

    gone = Part("gone", [[command("pass")._replace(out=Path("/nowhere/x.json"))]], 60, unreadable)
    code, entry, *_ = run([part("odd", "pass")._replace(read=unreadable), gone])
    assert code == 1
    assert entry["parts"]["odd"]["line"] == "its figures cannot be read: KeyError 'cases'"
    assert entry["parts"]["gone"]["line"].startswith("left no figures: ")


def test_a_part_that_runs_out_of_time_is_stopped_with_its_processes(run, tmp_path: Path) -> None:
    file = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True:\n  pathlib.Path({str(file)!r}).write_text(str(time.time()))"
    slow = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    code, entry, *_ = run([part("slow", slow, seconds=2), part("good", "print(1)")])
    assert code == 1
    assert entry["parts"]["slow"]["status"] == "late"
    assert entry["parts"]["slow"]["line"] == "was stopped after 2 seconds"
    assert entry["parts"]["good"]["status"] == "ok"
    written = file.read_text() if file.exists() else ""
    time.sleep(0.3)
    assert (file.read_text() if file.exists() else "") == written


# Starts a process, tells both in a file, and waits for its turn where it has one.
WAITS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
written = pathlib.Path({file!r} + ".new")
written.write_text(f"{{os.getpid()}} {{child.pid}}")
written.rename({file!r})
while (turn := os.environ.get("SLUICEGATE_TURN")) and not os.path.exists(turn):
    time.sleep(0.02)
child.kill()
print(os.getpid(), "goes on at", time.time())
"""
# Ends a little after the other program has come up.
WATCHES = """
import os, time
while not os.path.exists({file!r}):
    time.sleep(0.02)
time.sleep({seconds})
print("done at", time.time())
"""


def ahead(name: str, code: str, seconds: float = 60) -> Part:
    one = part(name, code, seconds=seconds)
    return one._replace(steps=[[one.steps[0][0]._replace(waits=True)]])


def alive(pids: list[int], seconds: float = 10) -> list[int]:
    """Those that still run after so long: who was killed ends when the system comes to it, under load not at once."""
    end = time.monotonic() + seconds
    while (running := [pid for pid in pids if _runs(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return running


def _runs(pid: int) -> bool:
    """One that has ended may not have been collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_in(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()]


def test_the_next_program_comes_up_beside_a_part_and_waits_for_its_turn(run, tmp_path: Path) -> None:
    file = tmp_path / "up"
    first = part("first", WATCHES.format(file=str(file), seconds=4))
    skipped = Part("none", [], 1, lambda found: Told("", found), "nothing to do here")
    # Its time and its limit count from its turn: from its start they would be over, by more than a busy machine adds.
    second = ahead("second", WAITS.format(file=str(file)), seconds=3.5)
    # That of an earlier run in the same folder is not its turn.
    (tmp_path / "second_0_0.turn").touch()
    code, entry, _, err = run([first, skipped, second, part("third", "print(3)")], "--work", str(tmp_path))
    assert code == 0, err
    parts = entry["parts"]
    ended, went_on = (float(parts[name]["line"].split()[-1]) for name in ("first", "second"))
    assert went_on > ended and parts["second"]["seconds"] < 3
    assert parts["second"]["line"].split()[0] == file.read_text().split()[0]
    # The third cannot wait.
    assert parts["third"]["status"] == "ok"


def test_a_program_whose_turn_does_not_come_is_ended(run, tmp_path: Path) -> None:
    file = tmp_path / "up"
    first = part("first", WATCHES.format(file=str(file), seconds=1000))
    code, entry, *_ = run([first, ahead("second", WAITS.format(file=str(file)))], "--minutes", "0.1")
    assert code == 1
    assert entry["parts"]["second"]["line"] == "there was no time left for it"
    assert len(pids_in(file)) == 2 and not alive(pids_in(file))


STOPPED = """
import runpy, signal, sys
from scripts import node_parts
from tests.unit.test_bench_node import WAITS, WATCHES, ahead, part

# Of a shell's job in the background it would be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
files = sys.argv.pop(), sys.argv.pop()
parts = [part("first", WAITS.format(file=files[0]) + "time.sleep(1000)"), ahead("second", WAITS.format(file=files[1]))]
node_parts.parts_of = lambda node: parts
sys.argv = ["bench_node.py", "--dry-run", "--commit", "abc"]
runpy.run_path("scripts/bench_node.py", run_name="__main__")
"""


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_ends_the_programs_of_this_part_and_of_the_next(tmp_path: Path, number: int, expected: int) -> None:
    files = [tmp_path / "first", tmp_path / "second"]
    words = [sys.executable, "-c", STOPPED, *map(str, files)]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as program:
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [pid for file in files for pid in pids_in(file)]
        # Of the first part only the child, which it ends, may have ended.
        assert len(alive(pids, seconds=0)) >= 3
        program.send_signal(number)
        assert program.wait(60) == expected, program.stderr
    assert not alive(pids)


def test_a_program_knows_who_started_it_ahead(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    prints = command(
        "import sys; sys.path.insert(0, '.'); from scripts import bench_ranks; print(bench_ranks.starter())"
    )
    assert bench_node.start(prints, log, log.with_suffix(".turn")).wait() == 0
    assert log.read_text().split() == [str(os.getpid())]


def test_a_second_stop_ends_programs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = command(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)"
    )
    process = bench_node.start(deaf, log := tmp_path / "a.log")
    while "deaf" not in log.read_text():
        time.sleep(0.05)
    wait = process.wait

    def interrupted(*_: float) -> int:
        monkeypatch.setattr(process, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_node.end([process])
    assert not alive([process.pid])


def test_no_part_begins_after_the_end(run) -> None:
    code, entry, *_ = run([part("first", "import time; time.sleep(60)"), part("second", "pass")], "--minutes", "0.01")
    assert code == 1
    assert entry["parts"]["second"]["line"] == "there was no time left for it"


def test_limits_and_choice_of_parts(run) -> None:
    parts = [part("one", "import time; time.sleep(60)"), part("two", "print(2)")]
    code, entry, *_ = run(parts, "--limit", "one=0.5", "--parts", "one")
    assert code == 1 and list(entry["parts"]) == ["one"] and entry["parts"]["one"]["status"] == "late"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc", "3"], "--nproc=3: must be 2, 4 or 8"),
        (["--parts", "helth"], "there is no part 'helth'; choose from health, parity"),
        (["--limit", "ep=soon"], "--limit ep=soon: must be a number of seconds"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"gpus": 1, "card": "x", "torch": "2", "cuda": None, "memory_gib": 80}
    monkeypatch.setattr(bench_node, "probe", lambda dry_run: machine)
    assert main([]) == 2
    assert "1 GPUs found, and the parts need 2; --dry-run runs on CPUs" in capsys.readouterr().err


def test_programs_are_told_what_the_machine_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = {"gpus": 2, "card": "x", "torch": "2", "cuda": None, "memory_gib": 80}
    monkeypatch.setattr(bench_node, "probe", lambda dry_run: dict(machine))
    monkeypatch.setattr(os, "environ", {**os.environ})
    one = command("from scripts.bench_results import probe; print(probe())")
    other = command("import os; print(os.environ.get('SLUICEGATE_MACHINE'))")._replace(devices="1")
    both = Part("both", [[one, other]], 60, lambda found: Told("", found))
    monkeypatch.setattr(bench_node, "parts_of", lambda node: [both])
    assert main(["--commit", "abc", "--out", str(tmp_path / "out.json")]) == 0
    told = json.loads((tmp_path / "out.json").read_text())["2_gpus"]["parts"]["both"]["figures"]
    # With some of its GPUs alone it asks itself.
    assert told == [f"{machine}\n", "None\n"]


def plan(nproc: int, memory_gib: float | None = 140.0, *overrides: str, **fields) -> dict[str, Part]:
    node = Node(nproc, memory_gib, False, list(overrides), Path("/w"), **fields)
    return {part.name: part for part in parts_of(node)}


def words(part: Part) -> list[str]:
    return [" ".join(one.words[1:]) for step in part.steps for one in step]


def test_the_plan_for_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    parts = plan(8, 140.0, "model.moe.backend=fused")
    (train,) = words(parts["train"])
    assert "--layers 48 --activation-checkpoint full --local-batch 4 model.moe.backend=fused" in train
    assert "--etp 2" in words(parts["ep x tp"])[0] and "--seq-len 131072" in words(parts["attention"])[0]
    together, alone = parts["weak scaling"].steps
    assert [one.devices for one in together] == ["0", "1,2", "3,4,5,6"]
    assert [one.devices for one in alone] == ["0,1,2,3,4,5,6,7"]
    assert all("--layers 8 --local-batch 2 --steps 15" in one for one in words(parts["weak scaling"]))
    assert parts["weak scaling"].lacks() == ""


def test_every_part_notes_the_commit_that_is_given() -> None:
    node = Node(4, 140.0, False, [], Path("/w"), commit="abc")
    commands = [command for one in parts_of(node) if one.name != "parity" for step in one.steps for command in step]
    assert len(commands) > 8 and all(" ".join(command.words).count("--commit abc") == 1 for command in commands)
    plain = parts_of(node._replace(commit=None))
    assert not any("--commit" in command.words for one in plain for step in one.steps for command in step)


def test_the_plan_for_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    parts = plan(4)
    assert [*parts][:2] == ["health", "parity"] and set(parts) == set(EXPECTED)
    for name in ("ep", "ep x tp"):
        assert "--backends symm_mem --experts fused" in words(parts[name])[0]
    assert "--sides matmul,nccl,ours" in words(parts["async tp"])[0]
    # Trained alike, but for the number of GPUs.
    (together,) = parts["weak scaling"].steps
    assert [one.devices for one in together] == ["0", "1,2"]
    alike = "--layers 8 --local-batch 4 --steps 10"
    assert alike in words(parts["train"])[0] and all(alike in one for one in words(parts["weak scaling"]))
    waiting = [name for name, one in parts.items() if any(each.waits for each in one.steps[0])]
    assert waiting == ["health", "comms", "ep", "ep x tp", "async tp", "attention"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 540 - 20 - sum(few for few, _ in EXPECTED.values())),
        ({"seconds": 600.0}, 600 - 20 - sum(few for few, _ in EXPECTED.values())),
        ({"seconds": 200.0}, 75),
        ({"chosen": ("parity", "train")}, 540 - 20 - EXPECTED["parity"][0] - EXPECTED["train"][0]),
    ],
)
def test_parity_gets_what_the_others_leave(fields: dict, expected: int) -> None:
    parity = plan(4, **fields)["parity"]
    assert f" seconds={expected} " in words(parity)[0] and parity.seconds == expected + 40
    assert expected >= 75


def test_weak_scaling_takes_over_the_figure_of_training(run, tmp_path: Path) -> None:
    file = tmp_path / "bench_train_whole.json"
    weak = {one.name: one for one in parts_of(Node(2, None, True, [], tmp_path))}["weak scaling"]

    def figures(size: int, speed: float | None) -> str:
        speeds = {"ours": speed, "torchtitan": None}
        return json.dumps({"qwen3": {"world_size": size, "layers": 2, "tokens_per_second_per_gpu": speeds}})

    alone = tmp_path / "alone.json"
    writes = command(f"import pathlib; pathlib.Path({str(alone)!r}).write_text({figures(1, 100.0)!r})")
    weak = weak._replace(steps=[[writes._replace(out=alone)]])
    for text, said in (
        ("", "the train part, with whose figure it compares, left none: "),
        (figures(4, 90.0), "the train part, with whose figure it compares, has none of ours on 2 GPUs"),
        (figures(2, None), "the train part, with whose figure it compares, has none of ours on 2 GPUs"),
    ):
        file.write_text(text)
        code, entry, *_ = run([weak])
        assert code == 1 and entry["parts"]["weak scaling"]["line"].startswith(said)
        assert not alone.exists()
    file.write_text(figures(2, 90.0))
    code, entry, *_ = run([weak])
    told = entry["parts"]["weak scaling"]
    assert code == 0 and told["line"] == "2 layers, tokens/s per GPU 1: 100, 2: 90; 2 GPUs / 1: 0.90"
    assert set(told["figures"]["by_size"]) == {"1", "2"}


def test_weak_scaling_alone_measures_every_size() -> None:
    """A figure of an earlier run in the same folder is not that of this one."""
    weak = plan(4, chosen=("health", "weak scaling"))["weak scaling"]
    assert [[one.devices for one in step] for step in weak.steps] == [["0", "1,2"], ["0,1,2,3"]]
    assert not weak.lacks()


def test_the_plan_for_fewer_and_smaller_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    parts = plan(2, 80.0)
    assert parts["ep x tp"].skipped and "--layers" not in words(parts["train"])[0]
    assert [[one.devices for one in step] for step in parts["weak scaling"].steps] == [["4"], ["4,6"]]
    assert all("--layers 4 " in one for one in words(parts["weak scaling"]))


def test_what_the_figures_say() -> None:
    text = "qwen3_30b_a3b, tiny, bf16 on cuda: 3 layouts against one process\n"
    text += " 8 x  tp=2 ep=2    right  2.9e-02  a.weight  (3.1 s)\n 8 x  tp=4   WRONG  3.0e-01  b  (1 s)\n"
    told = read_parity([f"{text}1 right, 1 wrong, 150 not tried (seconds=75)"])
    assert told.line == "1 of 2 layouts right in bf16 (150 not tried in the time), worst error 3.0e-01"
    with pytest.raises(ValueError, match="told no result"):
        read_parity(["Traceback"])
    runs = [
        {"m": {"world_size": size, "layers": 8, "tokens_per_second_per_gpu": {"ours": speed}}}
        for size, speed in ((1, 100.0), (4, 90.0), (2, 95.0))
    ]
    assert read_weak(runs).line.endswith("1: 100, 4: 90, 2: 95; 4 GPUs / 1: 0.90")


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_pair_meets_once(size: int) -> None:
    met = []
    for partners in rounds_of(size):
        assert [partners[partner] for partner in partners] == list(range(size))
        met += [(rank, partner) for rank, partner in enumerate(partners) if rank < partner]
    assert sorted(met) == [(one, other) for one in range(size) for other in range(one + 1, size)]


def test_problems_of_a_node() -> None:
    speeds = [389.0, 388.0, 120.0]
    pairs = [
        {"ranks": [0, index + 1], "put": speed, "get": None, "library": 240.0, "bad": index == 0}
        for index, speed in enumerate(speeds)
    ]
    found = {"unreachable": None, "pairs": pairs}
    assert problems(found, dry_run=True) == []
    slow, wrong = problems(found, dry_run=False)
    assert slow == "GPUs [0, 3]: put has 120 GB/s, the median pair 388"
    assert wrong == "GPUs [0, 1]: other bytes came than were sent"
    assert problems({"unreachable": "no access", "pairs": []}, dry_run=False) == ["no access"]
    facts = [read_facts("0, 1980, 1980, 35, 700.00, 0"), read_facts("1, 1980, 1980, 35, 700.00, 2")]
    assert ecc_problems(facts) == ["GPU 1: 2 uncorrected ECC errors"]
    assert read_facts("0, 1980, 1980, 35, [N/A], [N/A]")["ecc_errors"] is None


def parts_for(nproc: int) -> list[str]:
    """Of two all but weak scaling, which trains once more (tests above); of eight those that do more than the same with
    more ranks: rounds of pairs, and EP beside TP."""
    return [name for name in plan(nproc) if name != "weak scaling"] if nproc == 2 else ["health", "ep", "ep x tp"]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 8])
def test_dry_run(nproc: int, tmp_path: Path) -> None:
    out = tmp_path / "node.json"
    line = [
        str(SCRIPT),
        "--dry-run",
        "--nproc",
        str(nproc),
        "--out",
        str(out),
        "--commit",
        "abc",
        "--work",
        str(tmp_path),
        "--parts",
        ",".join(parts_for(nproc)),
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(out.read_text())[f"{nproc}_gpus"]["parts"]
    statuses = {name: part["status"] for name, part in parts.items()}
    expected = dict.fromkeys(parts_for(nproc), "ok")
    if nproc == 2:
        expected["ep x tp"] = "skipped"
    assert statuses == expected
    assert all(name in done.stdout for name in expected)
    assert parts["ep"]["figures"]
    if nproc == 2:
        assert parts["parity"]["figures"]["right"] >= 1 and parts["parity"]["figures"]["recipe"] == "fp64"
        figures = parts["async tp"]["figures"]
        assert set(figures["block"]) == set(figures["block_host"]) == {"none", "native"}
        assert parts["train"]["figures"]["tokens_per_second_per_gpu"]["ours"] > 0
