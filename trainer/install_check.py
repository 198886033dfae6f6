"""The packages of this program must come from one place.

Their names are short (`trainer`, `comms`), and another distribution with one of them could overwrite ours in
site-packages or be found first on the path: the run would then mix two programs. Nothing is imported to find out.
"""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "sluicegate"
# Each package with a file that only ours has.
PACKAGES = {
    "trainer": "install_check.py",
    "parallel": "mesh.py",
    "moe": "router.py",
    "comms": "all_to_all.py",
    "configs": "config.yaml",
}


def check_one_root(root: Path | None = None) -> None:
    """Check that all packages lie in `root` (default: where this file's package lies) and are ours.

    Raises:
        RuntimeError: names the package that is not, its place and the distribution that brought it.
    """
    root = root or Path(__file__).resolve().parent.parent
    for package, file in PACKAGES.items():
        folder = _folder(package)
        if folder is None:
            raise RuntimeError(f"package {package} is missing: expected in {root}; install {DISTRIBUTION} again")
        if folder.parent != root:
            raise RuntimeError(
                f"package {package} comes from {folder}{_owner(package, folder)}, but the others from {root}: "
                f"remove it, or put {root} first on PYTHONPATH"
            )
        if not (folder / file).is_file():
            raise RuntimeError(
                f"package {package} in {folder} is not {DISTRIBUTION}'s ({file} is missing){_owner(package, folder)}: "
                f"uninstall the intruder and install {DISTRIBUTION} again"
            )


def _folder(package: str) -> Path | None:
    spec = find_spec(package)
    if spec is None:
        return None
    if spec.origin:
        return Path(spec.origin).resolve().parent
    # A namespace package (a folder without __init__.py) has places but no origin.
    return next((Path(place).resolve() for place in spec.submodule_search_locations or ()), None)


def _owner(package: str, folder: Path) -> str:
    """` (installed by NAME)` for what the installed distributions claim in `folder`."""
    names = []
    for name in metadata.packages_distributions().get(package, []):
        base = metadata.distribution(name).locate_file(package)
        if name != DISTRIBUTION and Path(str(base)).resolve() == folder:
            names.append(name)
    return f" (installed by {', '.join(sorted(set(names)))})" if names else ""
