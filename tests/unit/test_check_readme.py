"""The README checker finds what does not exist and lets pass what does."""

from pathlib import Path

import pytest

from scripts.check_readme import Checkout, stale_names


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    files = {
        "trainer/__init__.py": "",
        "trainer/config.py": "class Config:\n    optim: OptimConfig = 1\n    data: DataConfig = 1\n"
        "    parallel: P = 1\n"
        "class OptimConfig:\n    lr: float = 1\nclass P:\n    ep: int = 1\n"
        "class DataConfig:\n    train: dict[str, SourceConfig] = 1\nclass SourceConfig:\n    paths: list[str] = 1\n",
        "trainer/metrics.py": 'NAMES = ("moe/load_entropy", "train/loss")\n',
        "moe/__init__.py": "",
        "moe/router.py": "def route(x): ...\nclass Routing:\n    def weights(self): ...\n",
        "parallel/__init__.py": "",
        "parallel/mesh.py": "class Mesh: ...\n",
        "configs/experiment/demo.yaml": "",
        "scripts/train.sh": "",
        "Makefile": "test: setup\n\ttrue\nsetup:\n\ttrue\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    "span",
    [
        "trainer/config.py",
        "configs/",
        "scripts/train.sh experiment=demo optim.lr=1e-3",
        "moe.router",
        "moe.router.route",
        "moe.router.Routing.weights",
        "route()",
        "Mesh",
        "Routing",
        "parallel.mesh.Mesh",
        "parallel.ep",
        "parallel.ep=2",
        "data.train.books.paths",
        "data.train.books.paths=[a.txt]",
        "experiment=demo",
        "make test",
        "train/loss",
        "moe/load_entropy",
        "runs/x/status.json",
        "metrics.jsonl",
        "experiment=NAME",
        "ValueError",
        "torch.nn.functional.grouped_mm",
        "NPROC=2",
        "--nproc-per-node",
    ],
)
def test_what_exists_passes(checkout: Checkout, span: str) -> None:
    assert stale_names(f"See `{span}`.", checkout) == []


@pytest.mark.parametrize(
    ("span", "stale"),
    [
        ("trainer/train.py", "trainer/train.py"),
        ("old_folder/", "old_folder/"),
        ("scripts/train.sh experiment=demo optim.rate=1e-3", "optim.rate=1e-3"),
        ("moe.layer", "moe.layer"),
        ("moe.router.dispatch", "moe.router.dispatch"),
        ("moe.router.Routing.ids", "moe.router.Routing.ids"),
        ("dispatch()", "dispatch()"),
        ("DispatchPlan", "DispatchPlan"),
        ("parallel.pp", "parallel.pp"),
        ("optim.momentum", "optim.momentum"),
        ("data.train.books.files=[a]", "data.train.books.files=[a]"),
        ("experiment=gone", "experiment=gone"),
        ("make deploy", "make deploy"),
        ("moe/no_metric", "moe/no_metric"),
    ],
)
def test_what_does_not_exist_is_named_with_its_line(checkout: Checkout, span: str, stale: str) -> None:
    problems = stale_names(f"# Title\n\nSee `{span}`.\n", checkout)
    assert len(problems) == 1
    assert problems[0].startswith(f"line 3: {stale}: ")


def test_shell_blocks_and_links_are_read_and_other_blocks_are_not(checkout: Checkout) -> None:
    text = (
        "```sh\nmake test  # see gone.py\npython -m trainer.gone experiment=gone\n```\n"
        "```python\nimport gone.py\n```\n[guide](docs/guide.md) [site](https://example.org/x.md)\n"
    )
    assert [problem.split(":")[1].strip() for problem in stale_names(text, checkout)] == [
        "trainer.gone",
        "experiment=gone",
        "docs/guide.md",
    ]
