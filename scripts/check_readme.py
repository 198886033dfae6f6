"""Checks that what README.md names exists: paths, Python names, config keys, experiments and make targets.

    python scripts/check_readme.py [FILE]

Prose is checked in its code spans and links, shell blocks word by word. Nothing is imported: names are looked up in the
syntax trees, so the check costs a second. Exit code 0 when all is well, 1 when something is stale, 2 for wrong usage.

    `trainer/data.py`, `docs/`           a file or folder of the checkout
    `moe.router.route`, `route()`, `MoE` a module or a name in it; a function or CapWords name defined in our packages
    `optim.lr`, `optim.lr=1e-3`          a key of the schema in trainer/config.py
    `experiment=demo`, `make test`       a file in configs/, a target of the Makefile
Other spans (`torchrun`, `NPROC`) are left alone. `train/loss`-like names must be metrics; `<...>` and `...` stand for
anything.
"""

import ast
import builtins
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("trainer", "parallel", "moe", "comms", "configs")
PATH_ENDINGS = (".py", ".sh", ".sbatch", ".md", ".toml", ".txt", ".yaml", ".yml", ".jsonl", ".json")
# Made by a run or by set-up, so not in a checkout.
MADE_LATER = re.compile(r"^(runs|tokenizer|\.venv|\.cache|wandb|profile|hf|checkpoints|build)(/|$)|^step_\d+|^slurm-")
MADE_NAMES = frozenset(
    "config.yaml overrides.yaml environment.json status.json metrics.jsonl events.jsonl log.txt latest".split()
)
# An example is not a claim.
PLACEHOLDER = re.compile(r"[<>*{}]|\.\.\.|\bNAME\b|\bPATH\b|\bmine\b|\bmy_|\bGROUP\b")


class Checkout:
    """What exists in a checkout, as read from its files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def has_path(self, text: str) -> bool:
        """Whether a file or folder exists, or is one that a command makes."""
        return (self.root / text).exists() or bool(MADE_LATER.match(text)) or text in MADE_NAMES

    @functools.cache  # noqa: B019 - one checkout per process
    def tree(self, path: Path) -> ast.Module:
        """The syntax tree of a Python file."""
        return ast.parse(path.read_text(), filename=str(path))

    @functools.cached_property
    def definitions(self) -> frozenset[str]:
        """Functions, classes and methods anywhere in the packages and scripts."""
        files = [path for folder in (*PACKAGES, "scripts") for path in (self.root / folder).rglob("*.py")]
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return frozenset(node.name for path in files for node in ast.walk(self.tree(path)) if isinstance(node, kinds))

    @functools.cached_property
    def schema(self) -> dict[str, dict[str, str]]:
        """Class name -> field -> annotation, of every annotated class in the files that make up the schema."""
        files = [*self.root.glob("*/config.py"), *self.root.glob("*/*/config.py")]
        classes = (node for path in files for node in ast.walk(self.tree(path)) if isinstance(node, ast.ClassDef))
        return {node.name: dict(_fields(node)) for node in classes}

    def has_config_key(self, dotted: str) -> bool:
        """Whether the schema has this dotted key."""
        kind, parts = "Config", dotted.split(".")
        while parts:
            annotation = self.schema.get(kind, {}).get(parts.pop(0))
            if annotation is None:
                return False
            if annotation.startswith("dict["):
                # Entries of a dict field are named by the user.
                parts = parts[1:]
            inner = [name for name in re.findall(r"\w+", annotation) if name in self.schema]
            if not inner:
                return not parts
            kind = inner[-1]
        return True

    def is_config_key(self, dotted: str) -> bool:
        """Whether the first word is a section of the schema."""
        return dotted.partition(".")[0] in self.schema.get("Config", {})

    def has_python_name(self, dotted: str) -> bool:
        """Whether a dotted name is a module of ours, or something that one defines."""
        parts = dotted.split(".")
        for count in range(len(parts), 0, -1):
            module = self.root.joinpath(*parts[:count])
            path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            if path.is_file():
                return _defines(self.tree(path), parts[count:])
        return False

    def has_option(self, group: str, name: str) -> bool:
        """Whether `configs/GROUP/NAME.yaml` exists."""
        return (self.root / "configs" / group / f"{name}.yaml").is_file()

    def has_group(self, group: str) -> bool:
        """Whether `configs/GROUP/` exists."""
        return group != "__pycache__" and (self.root / "configs" / group).is_dir()

    @functools.cached_property
    def make_targets(self) -> frozenset[str]:
        """Names of the Makefile's targets."""
        return frozenset(re.findall(r"^([\w-]+):(?!=)", (self.root / "Makefile").read_text(), re.M))

    @functools.cached_property
    def metrics(self) -> str:
        """Sources in which metric names are spelled."""
        return "".join(path.read_text() for path in sorted((self.root / "trainer").rglob("*.py")))


def stale_names(text: str, checkout: Checkout) -> list[str]:
    """One line for each thing that `text` (Markdown) names and `checkout` lacks, in order of appearance."""
    problems: dict[str, None] = {}
    for number, token in _tokens(text):
        if PLACEHOLDER.search(token):
            continue
        problem = _problem(token, checkout)
        if problem:
            problems[f"line {number}: {token}: {problem}"] = None
    return list(problems)


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """(line, token): code spans and link targets of prose, words of shell blocks."""
    language = None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"\s*```\s*(\w*)", line)
        if fence:
            language = (fence[1] or "text") if language is None else None
        elif language in ("sh", "bash", "shell", "console"):
            yield from ((number, token) for token in _shell_tokens(line))
        elif language is None:
            for span in re.findall(r"`([^`]+)`", line):
                yield from ((number, token) for token in ([span] if " " not in span else _shell_tokens(span)))
            for target in re.findall(r"\]\(([^)#\s]+)", line):
                if "://" not in target:
                    yield number, target


def _shell_tokens(line: str) -> Iterator[str]:
    words = re.sub(r"(^|\s)#.*", "", line).replace("'", "").replace('"', "").split()
    for previous, word in zip(["", *words], words, strict=False):
        if previous == "make" and not word.startswith("-") and "=" not in word:
            yield f"make {word}"
        elif previous == "-m" and word.partition(".")[0] in PACKAGES:
            yield word
        elif word.startswith("ARGS="):
            yield word.removeprefix("ARGS=")
        elif "=" in word or "/" in word or word.endswith(PATH_ENDINGS):
            yield word


def _problem(token: str, checkout: Checkout) -> str | None:
    """What is wrong with `token`; None when it exists or claims nothing."""
    token = token.strip().rstrip(",;:")
    if token.startswith("make "):
        return None if token[5:] in checkout.make_targets else "no such target in the Makefile"
    if "=" in token and re.match(r"^~?[a-z_][\w.]*=", token):
        key, _, value = token.partition("=")
        return _override_problem(key, value, checkout)
    if re.fullmatch(r"\w+\(\)", token):
        known = token[:-2] in checkout.definitions or hasattr(builtins, token[:-2])
        return None if known else "no function of that name"
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+(\(\))?", token) and not token.endswith(PATH_ENDINGS):
        return _dotted_problem(token.removesuffix("()"), checkout)
    if re.fullmatch(r"[A-Z][a-z0-9]+([A-Z]\w*)|MoE", token):
        known = token in checkout.definitions or hasattr(builtins, token)
        return None if known else "no class of that name"
    return _path_problem(token, checkout)


def _override_problem(key: str, value: str, checkout: Checkout) -> str | None:
    key = key.lstrip("~")
    if checkout.has_group(key) and "." not in key:
        return None if checkout.has_option(key, value) else f"no configs/{key}/{value}.yaml"
    if not checkout.is_config_key(key):
        return "no such section of the config" if "." in key else None
    return None if checkout.has_config_key(key) else "no such key in the config"


def _dotted_problem(dotted: str, checkout: Checkout) -> str | None:
    """`parallel.ep` is a key and `parallel.mesh` a module: one of the two is enough."""
    ours = dotted.partition(".")[0] in PACKAGES
    if not ours and not checkout.is_config_key(dotted):
        return None
    if (ours and checkout.has_python_name(dotted)) or checkout.has_config_key(dotted):
        return None
    return "neither a module, a name in one, nor a key of the config"


def _path_problem(token: str, checkout: Checkout) -> str | None:
    path = token.removeprefix("./")
    first = path.partition("/")[0]
    if not re.fullmatch(r"[\w.@+-][\w./@+-]*", path) or path.startswith("/"):
        return None
    claims_a_path = path.endswith(PATH_ENDINGS) or path.endswith("/") or ("/" in path and checkout.has_path(first))
    if not claims_a_path or checkout.has_path(path):
        return None
    if re.fullmatch(r"(train|eval|perf|moe)/\w+", path) and f'"{path}"' in checkout.metrics:
        return None
    return "no such file or folder"


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, ast.unparse(statement.annotation)


def _defines(tree: ast.Module | ast.ClassDef, names: list[str]) -> bool:
    if not names:
        return True
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == names[0]:
            return len(names) == 1 or (isinstance(node, ast.ClassDef) and _defines(node, names[1:]))
        if len(names) == 1 and names[0] in _assigned(node):
            return True
    return False


def _assigned(node: ast.stmt) -> list[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def main(arguments: list[str]) -> int:
    """Check the files named, README.md if none; returns the exit code: 0 fine, 1 problems (printed), 2 usage."""
    root = Path(__file__).resolve().parent.parent
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(arguments[0]) if arguments else root / "README.md"
    if not path.is_file():
        print(f"check_readme: no file {path}", file=sys.stderr)
        return 2
    problems = stale_names(path.read_text(), Checkout(root))
    for problem in problems:
        print(f"{path.name}, {problem}", file=sys.stderr)
    print(f"check_readme: {len(problems)} stale name(s) in {path.name}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
