"""Composition: the order of precedence, and that every mistake names the setting and the nearest valid one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.compose import (
    CONFIG_DIR,
    GROUPS,
    compose,
    config_from_command_line,
    config_to_yaml,
    exit_with_mistake,
    group_options,
    help_text,
    load_config,
    parse_command_line,
)
from trainer.config import Config
from trainer.schema import known_keys, leaf_type


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError) as raised:
        compose(["experiment=demo", *overrides])
    return str(raised.value)


def test_later_layers_win() -> None:
    # Schema (1e-8) < group file (adamw: 100) < experiment (demo: 3e-3) < command line, and the last word of two.
    config = compose(["optim.betas=[0.8,0.9]", "experiment=demo", "optim.betas=[0.7,0.9]"])
    assert config.optim.eps == 1e-8
    assert config.optim.lr == 3e-3
    assert config.optim.betas == [0.7, 0.9]
    assert compose([]).optim.warmup_steps == 100


def test_experiment_values_are_not_overwritten_by_config_yaml() -> None:
    config = compose(["experiment=qwen3_30b_a3b_bench"])
    assert (config.model.num_layers, config.model.dim, config.checkpoint.every) == (8, 2048, None)
    assert config.experiment == "qwen3_30b_a3b_bench"
    assert compose([]).experiment is None


def test_group_on_the_command_line_beats_the_experiment() -> None:
    assert compose(["experiment=demo", "optim=sgd", "precision=fp64"]).precision.recipe == "fp64"


def test_result_is_plain_dataclasses() -> None:
    config = compose(["experiment=demo", "model.moe.capacity_factor=1.5"])
    assert type(config) is Config
    assert type(config.data.train) is dict and type(config.optim.betas) is list
    assert config.model.moe.capacity_factor == 1.5


@pytest.mark.parametrize("group", sorted(set(GROUPS) - {"experiment", "model"}))
def test_every_option_composes(group: str) -> None:
    # Experiments and models: test_experiments.py.
    needs_value = {
        "data=none": ["data.train.a.paths=[a]"],
        "data=text": ["data.train.text.paths=[a]"],
        "data=tokens": ["data.train.tokens.paths=[a]"],
        "data=sft": ["data.train.sft.paths=[a]"],
    }
    assert group_options(group)
    for option in group_options(group):
        word = f"{group}={option}"
        compose([word, *needs_value.get(word, [])])


def test_dict_entries_need_no_plus_and_can_be_deleted() -> None:
    config = compose(["data=none", "data.train.mine.paths=[a.txt]", "data.train.other={paths: [b], weight: 2}"])
    assert config.data.train["mine"].kind == "text"
    assert config.data.train["other"].weight == 2.0
    config = compose(["data=text", "data.train.mine.paths=[a.txt]", "~data.train.text"])
    assert list(config.data.train) == ["mine"]


def test_a_section_can_stand_for_another() -> None:
    config = compose(["data.eval=${data.train}"])
    assert config.data.eval == config.data.train
    one = compose(["data.eval.again=${data.train.stdlib}"])
    assert one.data.eval["again"] == one.data.train["stdlib"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=1", "optim.lrr is not a setting; did you mean optim.lr?"),
        ("lr=1", "lr is not a setting; did you mean optim.lr?"),
        ("optimm.lr=1", "did you mean optim.lr?"),
        ("logging.every=1", "logging.every is not a setting; did you mean train.log_every?"),
        ("eval.every=1", "did you mean train.eval_every?"),
        ("train.checkpoint_every=1", "did you mean checkpoint.every?"),
        ("warmup.steps=1", "did you mean optim.warmup_steps?"),
        ("train.seed=1", "did you mean run.seed?"),
        ("train.batch_size=1", "did you mean train.micro_batch_size or train.global_batch_size?"),
        ("optim.lr.x=1", "optim.lr is a single value"),
        ("+optim.lr=1", "write optim.lr=1"),
        ("++optim.lr=1", "write optim.lr=1"),
        ("+optim.lrr=1", "did you mean optim.lr?"),
        ("+experiment=demo", "write experiment=demo"),
        ("~optim.lr", "only entries like data.train.NAME can be deleted"),
        ("~data.train.nope", "no such entry; data.train has stdlib"),
        ("data.train.mine.pathz=[a]", "did you mean data.train.mine.paths?"),
        ("parallel.pp=2", "there is no pipeline axis"),
        ("hydra.run.dir=x", "Hydra's own settings cannot be changed"),
        ("experiment=dmo", "experiment=dmo: no such option; did you mean demo? (options: "),
        ("optim=adam", "optim=adam: no such option; did you mean adamw?"),
        ("optim={lr: 2}", "optim takes the name of one file (adamw, sgd)"),
        ("optim=null", "optim takes the name of one file"),
        ("optim.lr=1,2", "a sweep needs --multirun"),
        ("optim.lr", "cannot read 'optim.lr' as key=value"),
        ("optim.lr=abc", "optim.lr=abc: must be a number such as 1e-3"),
        ("train.steps=1.5", "train.steps=1.5: must be a whole number"),
        ("train.steps=null", "train.steps=null: must be a whole number"),
        ("train.max_tokens=many", "train.max_tokens=many: must be a whole number or null"),
        ("parallel.compile=maybe", "parallel.compile=maybe: must be true or false"),
        ("optim.betas=[a,b]", "optim.betas[0]=a: must be a number such as 1e-3"),
        ("optim.betas=0.9", "optim.betas: must be a list such as '[0.9,0.95]'"),
        ("data.cache_dir=${nope.x}", "data.cache_dir: must be text"),
        ("data.eval={}", "data.eval={} changes nothing, entries are merged; data.eval is a section of entries"),
        ("data.eval=null", "data.eval=null: data.eval is a section of entries data.eval.NAME, each with kind, paths, "),
        ("data.eval=null", "; ~data.eval.NAME removes one, train.eval_every=null evaluates none"),
        ("~data.eval", "; ~data.eval.NAME removes one"),
        (
            "data.train.paths=[a]",
            "data.train.paths=[a]: paths is a setting of an entry; did you mean data.train.NAME.paths?",
        ),
        ("=1", "cannot read '=1' as key=value: it has no key"),
        ("zoo.loss=1", "zoo.loss is not a setting"),
        ("data.train.stdlib=[a]", "data.train.stdlib is a section with kind, paths, "),
        ("data.train.stdlib=null", "; ~data.train.stdlib removes it"),
        ("data.train.stdlib.paths={}", "data.train.stdlib.paths={}: must be a list such as '[a,b]'"),
        ("logging.wandb=x", "logging.wandb=x: logging.wandb is a section with mode, project, entity, name, tags"),
    ],
)
def test_mistakes_name_the_setting_and_what_is_meant(override: str, expected: str) -> None:
    message = refusal(override)
    assert expected in message
    assert "\n" not in message


def test_mistakes_inside_files_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    header = "# @package _global_\n"
    (tmp_path / "experiment" / "bad_key.yaml").write_text(header + "optim:\n  lrr: 1.0\n")
    (tmp_path / "experiment" / "bad_type.yaml").write_text(header + "optim:\n  lr: fast\n")
    (tmp_path / "experiment" / "bad_option.yaml").write_text(header + "defaults:\n  - override /optim: adamm\n")
    (tmp_path / "experiment" / "bad_section.yaml").write_text(header + "data:\n  eval: null\n")
    (tmp_path / "experiment" / "good.yaml").write_text(header + "optim:\n  lr: 0.5\n")
    expected = {
        "bad_key": "experiment/bad_key.yaml: optim.lrr is not a setting; did you mean optim.lr?",
        "bad_type": "experiment/bad_type.yaml: optim.lr=fast: must be a number such as 1e-3",
        "bad_section": "experiment/bad_section.yaml: data.eval is a section of entries data.eval.NAME",
        "bad_option": "optim=adamm: no such option; did you mean adamw?",
    }
    for name, message in expected.items():
        with pytest.raises(ValueError, match=f"(?s){message.replace('?', '.')}"):
            compose([f"experiment={name}"], str(tmp_path))
    assert compose(["experiment=good"], str(tmp_path)).optim.lr == 0.5
    with pytest.raises(ValueError, match="--config-dir: no folder"):
        compose([], str(tmp_path / "missing"))


def test_saved_config_reads_back_equal(tmp_path: Path) -> None:
    config = compose(["experiment=demo", "data.train.mine={paths: [a], weight: 0.5}", "run.id=007", "optim.eps=1e-9"])
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_load_config_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    with pytest.raises(FileNotFoundError, match="no config file"):
        load_config(file)
    file.write_text("optim:\n  lrr: 1\n")
    with pytest.raises(ValueError, match=r"config\.yaml: optim\.lrr is not a setting; did you mean optim\.lr"):
        load_config(file)
    file.write_text("optim: [\n")
    with pytest.raises(ValueError, match=r"config\.yaml: not valid YAML"):
        load_config(file)


def test_command_line_flags() -> None:
    line = parse_command_line(["-m", "optim.lr=1,2", "--config-dir", "x", "--cfg=job"])
    assert line.multirun and line.show_config and not line.help
    assert (line.config_dir, line.overrides) == ("x", ["optim.lr=1,2"])
    with pytest.raises(ValueError, match="unknown flag --multrun; did you mean --multirun"):
        parse_command_line(["--multrun"])
    with pytest.raises(ValueError, match="--cfg hydra"):
        parse_command_line(["--cfg", "hydra"])


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config_from_command_line(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(option in printed for group in GROUPS for option in group_options(group))
    assert "--multirun" in help_text()


def test_cfg_job_prints_the_composed_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        config_from_command_line(["--cfg", "job", "experiment=demo", "optim.lr=0.25"])
    assert ended.value.code == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "config.yaml").optim.lr == 0.25


def test_a_sweep_is_not_shown_and_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config_from_command_line(["--multirun", "--cfg", "job", "experiment=demo", "optim.lr=1e-3,2e-3"])
    assert ended.value.code == 2 and "--cfg job shows one run" in capsys.readouterr().err


def test_a_mistake_of_bytes_that_are_no_characters_reaches_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLUICEGATE_EXIT_FILE", str(tmp_path / "exit"))
    with pytest.raises(SystemExit) as ended:
        config_from_command_line(["run.id=\udcff"])
    assert ended.value.code == 2
    assert (tmp_path / "exit").read_text().startswith("2\ncannot read 'run.id=")


def test_only_rank_0_speaks_and_all_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    waited = []
    monkeypatch.setattr("trainer.compose.time.sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    monkeypatch.setenv("SLUICEGATE_EXIT_FILE", str(tmp_path / "exit"))
    reason = "optim.lrr is not a setting; did you mean optim.lr?\n"
    # Rank 1 speaks only if rank 0's end has not ended it meanwhile.
    for rank, spoken in (("1", f"error on rank 1: {reason}"), ("0", f"error: {reason}")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            config_from_command_line(["optim.lrr=1"])
        assert ended.value.code == 2
        assert capsys.readouterr().err == spoken
        assert (tmp_path / "exit").exists() == (rank == "0")
    assert (tmp_path / "exit").read_text() == f"2\n{reason}"
    assert waited == [(15.0, "")]
    with pytest.raises(SystemExit):
        exit_with_mistake(ValueError("x"))


def test_the_beginning_of_a_name_is_understood() -> None:
    with pytest.raises(ValueError, match=r"precision=fp8: no such option; did you mean fp8_blockwise or "):
        compose(["precision=fp8"])


def test_composing_leaves_no_trace_and_needs_no_torch(tmp_path: Path) -> None:
    # From a bare checkout, in another folder, with PYTHONPATH alone.
    code = (
        "import sys; from trainer.compose import compose; from trainer.layout import fit_layout\n"
        "fit_layout(compose(['experiment=demo']), 2); print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
    assert not list(tmp_path.iterdir())


def test_every_key_of_the_schema_is_found() -> None:
    keys = known_keys()
    assert "model.moe.top_k" in keys and "data.train.NAME.paths" in keys
    for key in keys:
        leaf_type(key)
