"""The loader: what it accepts, what it says about mistakes, and that every shipped file loads."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli

from matrixtitan.config import (
    CONFIG_FOLDER,
    Config,
    ConfigError,
    all_keys,
    config_from_dict,
    help_text,
    load_config,
    markdown,
    option_tables,
    tables,
    to_toml,
    upgraded,
)
from matrixtitan.data.tokenizer import EMBEDDED_PATH, load_tokenizer
from matrixtitan.optim.lr_schedule import lr_factor

NEEDS_FILES = sorted(path.name for path in CONFIG_FOLDER.glob("llama_*.toml"))
EMBEDDED = ["--model.tokenizer_path", "", "--data.sources", '[{type = "python_stdlib"}]']


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nglobal_batch_size = 8\n" + text)
    return load_config(["--config", str(path), *overrides])


@pytest.mark.parametrize("path", sorted(CONFIG_FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads(path: Path) -> None:
    config = load_config(["--config", str(path), *EMBEDDED])
    assert config_from_dict(tomli.loads(to_toml(config)), "again") == config


@pytest.mark.parametrize("name", NEEDS_FILES)
def test_real_configs_say_what_they_lack_and_how_to_run_without(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["--config", name, "--training.steps", "100"])
    message = str(error.value)
    assert "tokenizer.model" in message
    assert "data.sources[0].path" in message
    assert """--model.tokenizer_path "" --data.sources '[{type = "python_stdlib"}]'""" in message


def test_a_tokenizer_is_a_file_or_a_folder_that_holds_one(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    text = (
        f'[model]\ntokenizer_path = "{folder}"\n[data]\nsources = [{{ type = "python_stdlib" }}]\n'
    )
    with pytest.raises(ConfigError, match=r"llama/tokenizer\.model.* or to a folder that contains"):
        load(tmp_path, text)
    shutil.copy(EMBEDDED_PATH, folder / "tokenizer.model")
    assert load(tmp_path, text).model.tokenizer_path == str(folder)
    assert load_tokenizer(str(folder), "llama3").path == str(folder / "tokenizer.model")


def test_a_path_with_brackets_is_that_path(tmp_path: Path) -> None:
    (tmp_path / "part [1].txt").write_text("text")
    sources = f'[data]\nsources = [{{ type = "text", path = "{tmp_path}/part [1].txt" }}]\n'
    assert load(tmp_path, sources).data.sources[0].type == "text"


def test_names_are_found_with_and_without_suffix_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        load_config([])
        == load_config(["--config", "debug"])
        == load_config(["--config=debug.toml"])
    )
    (tmp_path / "debug.toml").write_text("[training]\nglobal_batch_size = 3\n")
    assert load_config(["--config", "debug"]).training.global_batch_size == 3  # a path comes first
    with pytest.raises(ConfigError, match="did you mean debug"):
        load_config(["--config", "debgu"])


def test_overrides_of_every_kind(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "",
        "--training.steps",
        "12",
        "--job.description=two words = here",
        "--optimizer.lr",
        "1",
        "--optimizer.tail_patterns",
        '["layers.0.*", "a b"]',
        "--optimizer.muon.per_head_patterns",
        "layers.*.wq.weight",
        "--compile.enable",
        "true",
        "--lr_scheduler.warmup_steps",
        "2",
        "--optimizer.groups",
        '[{pattern = "layers.*", lr = 0.5}]',
        "--model.tie_embeddings",
        "none",
        "--optimizer.muon.ns_coefficients",
        "[[1, 2, 3], [4.5, 5, 6]]",
        "--data.seed",
        "7",
    )
    assert config.training.steps == 12
    assert config.job.description == "two words = here"
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.optimizer.tail_patterns == ("layers.0.*", "a b")
    assert config.optimizer.rule.per_head_patterns == ("layers.*.wq.weight",)
    assert config.compile.enable is True
    assert config.optimizer.groups[0].lr == 0.5
    assert config.optimizer.groups[0].weight_decay is None
    assert config.model.tie_embeddings is None
    assert config.optimizer.rule.ns_coefficients == ((1.0, 2.0, 3.0), (4.5, 5.0, 6.0))
    assert config.data.seed == 7


ADAMW, SOAP, SHAMPOO = (("--optimizer.name", name) for name in ("adamw", "soap", "shampoo"))
MISTAKES = [
    ("[trainig]\nsteps = 1", (), r"unknown section \[trainig\]; did you mean training"),
    ("[optimizer]\nlearning_rate = 1", (), r"unknown key optimizer\.learning_rate"),
    ("", ("--training.step", "3"), r"--training\.step; did you mean training\.steps\?"),
    ("", ("--training.steps", "1.5"), r"training\.steps must be whole number, not 1\.5"),
    ("", ("--training.steps", "true"), r"training\.steps must be whole number"),
    (
        "",
        ("--optimizer.muon.ns_coefficients", "quintc"),
        r"ns_coefficients must be quintic\|polar_express or list",
    ),
    ("", ("--compile.enable", "1"), r"compile\.enable must be true or false"),
    ("", ("--optimizer.name", "muonn"), "did you mean muon"),
    ("", ("--optimizer.tail_patterns", "['a"), "is no TOML value"),
    ("", ("--training.steps",), "lacks a value"),
    ("", ("steps", "3"), "belongs to no option"),
    (
        "",
        ("--training.global_batch_size", "0"),
        r"training\.global_batch_size is 0; it is required",
    ),
    (
        "",
        ("--parallelism.tensor_parallel_degree", "2"),
        r"unknown key --parallelism\.tensor_parallel_degree; there are strategy, data_parallel_rep",
    ),
    ("", ("--metrics.enable_wandb", "true"), r"enable_wandb; there are log_freq, enable_tensorboa"),
    (
        "[optimizer]\nmomentum = 0.9",
        (),
        r"unknown key optimizer\.momentum; it is optimizer\.muon\.m",
    ),
    ("", ("--optimizer.eps", "1"), r"--optimizer\.eps; it is optimizer\.shampoo\.eps or "),
    ("[optimizer.soap]\neps = 0.1", (), r"run\.toml: optimizer\.soap\.eps has no effect.* is muon"),
    ("", ("--optimizer.soap.eps", "0.1"), r"command line: optimizer\.soap\.eps has no effect"),
    (
        "",
        ("--parallelism.strategy", "ddp", "--parallelism.transport", "ring"),
        r"parallelism\.transport is set, but has no effect: it needs parallelism\.strategy matrix_",
    ),
    ("", ("--optimizer.matrix_exchange", "gather_each"), r"it needs parallelism\.strategy fsdp2"),
    (
        "",
        (*SHAMPOO, "--optimizer.shampoo.graft", "none", "--optimizer.shampoo.graft_beta", "0.5"),
        r"optimizer\.shampoo\.graft_beta is set, but has no effect: it needs graft adam, and that",
    ),
    ("", ("--training.max_consecutive_skips", "3"), r"it needs on_nonfinite skip"),
    ("", ("--checkpoint.export_dtype", "bfloat16"), r"it needs last_save_model_only true"),
    (
        "",
        ("--data.sources", '[{type = "python_stdlib", field = "x"}]'),
        r"has no effect on a source",
    ),
    ("", ("--parallelism.egress_cap", "0.5"), r"egress_cap is 0\.5; write 0 for no cap"),
    ("", ("--parallelism.strategy", "fsdp2", "--optimizer.name", "soap"), r"optimizer\.name soap"),
    (
        "",
        ("--lr_scheduler.warmup_steps", "2000"),
        r"lr_scheduler\.warmup_steps 2000 exceeds the 1000 steps",
    ),
    ("", ("--lr_scheduler.decay_ratio", "0.9"), "overlap"),
    (
        "",
        ("--lr_scheduler.total_steps", "500"),
        r"total_steps 500 ends before training\.steps 1000, and the rate of all later steps would",
    ),
    ("", ("--checkpoint.keep_latest_k", "1"), "keep at least 2"),
    (
        "",
        ("--parallelism.dry_run_world_size", "4", "--checkpoint.enable", "true"),
        r"checkpoint\.enable: a dry run",
    ),
    ("", ("--activation_checkpoint.selective_ac_option", "some"), "write op or a number"),
    ("", ("--data.sources", '[{type = "text", path = "/none/*.txt"}]'), "nothing matches '/none/"),
    ("", ("--data.sources", '[{type = "text"}]'), "needs a path"),
    ("", ("--data.sources", '[{kind = "text"}]'), r"unknown key data\.sources\[0\]\.kind"),
    ("steps = [", (), "not a TOML file"),
    ("", ("--optimizer.lr", "nan"), r"optimizer\.lr must be number, not nan"),
    (
        "",
        ("--optimizer.muon.ns_coefficients", "[[nan, 0, 0]]"),
        r"optimizer\.muon\.ns_coefficients must be",
    ),
    ("", ("--optimizer.tail_lr", "inf"), r"optimizer\.tail_lr is inf; it must be finite"),
    ("", ("--optimizer.tail_weight_decay", "-1"), r"optimizer\.tail_weight_decay is -1\.0"),
    ("", ("--optimizer.tail_betas", "[0.9, 1.5]"), r"optimizer\.tail_betas holds 1\.5"),
    ("", (*ADAMW, "--optimizer.adamw.betas", "[0.9]"), r"optimizer\.adamw\.betas is .* two"),
    ("", (*ADAMW, "--optimizer.adamw.betas", "[0.9, 1]"), r"optimizer\.adamw\.betas holds 1\.0"),
    ("", ("--optimizer.muon.momentum", "1.5"), r"optimizer\.muon\.momentum is 1\.5"),
    ("", ("--optimizer.muon.ns_steps", "100"), r"optimizer\.muon\.ns_steps is 100"),
    ("", ("--optimizer.muon.ns_coefficients", "[[inf, 1, 1]]"), "triples of finite numbers"),
    (
        "",
        (*SOAP, "--optimizer.soap.max_precond_dim", "0"),
        r"optimizer\.soap\.max_precond_dim is 0",
    ),
    ("", (*SOAP, "--optimizer.soap.shampoo_beta", "2"), r"optimizer\.soap\.shampoo_beta is 2"),
    ("", (*SHAMPOO, "--optimizer.shampoo.graft_beta", "2"), r"optimizer\.shampoo\.graft_beta is 2"),
    ("", ("--validation.local_batch_size", "-1"), r"validation\.local_batch_size is -1"),
    ("", ("--validation.steps", "0"), r"validation\.steps is 0"),
    ("", ("--checkpoint.load_step", "-7"), r"checkpoint\.load_step is -7"),
    ("", ("--checkpoint.initial_load_path", "x"), r"checkpoint\.enable is false"),
    ("", ("--activation_checkpoint.selective_ac_option", "²"), "write op or a number"),
    (
        "",
        ("--optimizer.muon.ns_coefficients", "[[1, 2]]"),
        r"optimizer\.muon\.ns_coefficients must hold triples",
    ),
    (
        "",
        ("--optimizer.muon.ns_coefficients", "[]"),
        r"optimizer\.muon\.ns_coefficients must hold triples",
    ),
    (
        "",
        (
            "--optimizer.muon.ns_coefficients",
            "[[1, 2, 3], [1, 2, 3]]",
            "--optimizer.muon.ns_steps",
            "1",
        ),
        r"holds 2 triples for ns_steps 1",
    ),
    ("", ("--training.seq_len", "9" * 20), r"training\.seq_len is 9{20}; it must be at most 2147"),
    ("", ("--data.seed", "9" * 20), r"data\.seed is 9{20}; it must be from -9223"),
    ("", ("--optimizer.lr", "9" * 400), r"optimizer\.lr must be number, not 999"),
    ("", ("--training.steps", "9" * 5000), r"training\.steps must be whole number, not '999"),
    ("[job]\ndescription = " + "9" * 5000, (), "not a TOML file"),
    ("[[job]]\n", (), r"job is \[\{\}\]; it must be a table: write its keys below a line \[job\]"),
    ("", ("--optimizer.groups", "[{lr = 1}]"), r"optimizer\.groups\[0\]\.pattern is empty"),
    (
        "",
        ("--optimizer.groups", '[{pattern = "*", lr = -1}]'),
        r"optimizer\.groups\[0\]\.lr is -1\.0",
    ),
]


@pytest.mark.parametrize(("text", "overrides", "message"), MISTAKES)
def test_mistakes_name_the_key_and_what_to_change(
    tmp_path: Path, text: str, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text, *overrides)


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        (("--lr_scheduler.min_lr_factor", "0.1"), True),
        (("--lr_scheduler.decay_ratio", "0"), True),
        (("--lr_scheduler.warmup_steps", "500"), True),
        (("--lr_scheduler.warmup_steps", "499"), False),
        (("--lr_scheduler.decay_ratio", "0.1"), False),
    ],
)
def test_a_schedule_may_end_before_the_run_where_its_last_rate_is_not_0(
    tmp_path: Path, overrides: tuple[str, ...], fits: bool
) -> None:
    short = ("--lr_scheduler.total_steps", "500", *overrides)
    if fits:
        config = load(tmp_path, "", *short)
        assert lr_factor(config.lr_scheduler, 500, 1000) > 0
        return
    with pytest.raises(ConfigError, match=r"total_steps 500 ends before training\.steps 1000"):
        load(tmp_path, "", *short)


def test_of_a_key_given_twice_the_last_value_counts(tmp_path: Path) -> None:
    assert (
        load(tmp_path, "", "--training.steps", "3000", "--training.steps=4000").training.steps
        == 4000
    )


def test_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml"):
        load(tmp_path, "[optimizer]\nlr = 'fast'")


def test_print_config_prints_what_loads_to_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[training]\nglobal_batch_size = 8\n[job]\ndescription = "a \\"b\\" \\\\ c"\n')
    expected = load_config(["--config", str(path), "--optimizer.lr", "1e-4"])
    with pytest.raises(SystemExit) as stop:
        load_config(["--config", str(path), "--optimizer.lr", "1e-4", "--print-config"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert config_from_dict(tomli.loads(printed), "printed") == expected


def test_help_lists_every_key_with_type_default_and_meaning() -> None:
    text = help_text()
    for name in all_keys():
        assert f"--{name}  (" in text
    for table in option_tables().values():
        for option in dataclasses.fields(table):
            assert option.name == "rule" or option.metadata["doc"] in text


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().training.steps = 3  # type: ignore[misc]


def test_text_with_any_character_survives_printing(tmp_path: Path) -> None:
    config = load(
        tmp_path, "", "--job.description", 'tab\t quote" back\\slash \r\x01\x7f \N{SNOWMAN}'
    )
    assert config_from_dict(tomli.loads(to_toml(config)), "printed") == config


def test_a_config_saved_by_an_older_release_differs_in_nothing() -> None:
    old = Path(__file__).parents[1] / "golden" / "data" / "old_checkpoints"
    for name in ("muon", "soap"):
        saved = upgraded(json.loads((old / name / "step-4" / "config.json").read_text()))
        config = config_from_dict(_without_nulls(saved), "saved")
        assert config.optimizer.name == name
        assert json.loads(json.dumps(tables(config))) == saved


def _without_nulls(saved: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        section: {key: value for key, value in table.items() if value is not None}
        for section, table in saved.items()
    }


def test_the_page_on_configuration_is_what_the_schema_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == markdown(), "run: python -m matrixtitan.config > " + str(page)
