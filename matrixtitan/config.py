"""What a run can be told: one frozen dataclass per TOML section, a strict loader, `--section.key value` overrides.

Every key's type, default and meaning stand once, in the dataclasses, and `--help` prints them. Names follow torchtitan
where it has the key. Owns parsing and the checks that need no process group, so that a mistake stops a run before it
starts anything. Imports neither torch nor the rest of the package. Next: `trainer.py` for what a run does with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import glob
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "train_configs"
EMBEDDED_OVERRIDES = """--model.tokenizer_path "" --data.sources '[{type = "python_stdlib"}]'"""
"""Runs any config on the tokenizer and data that every machine has."""

TOKENIZER_NAME = "tokenizer.model"
"""The rank file in a folder."""

NOT_NEGATIVE = (
    "lr",
    "weight_decay",
    "tail_lr",
    "tail_weight_decay",
    "tail_eps",
    "eps",
    "graft_eps",
)
"""Keys of [optimizer] that must be finite too."""

Dtype = Literal["float32", "bfloat16"]


class ConfigError(ValueError):
    """A mistake in a config file or an override; the message names the key, where it stands and what to change."""


def key(default: Any, doc: str) -> Any:
    """A config key: its default and its meaning, which `--help` prints."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class JobConfig:
    dump_folder: str = key("./outputs", "folder of everything the run writes")
    description: str = key("", "free text, logged and saved with the run")


@dataclass(frozen=True)
class ModelConfig:
    name: str = key("llama3", "model family")
    flavor: str = key(
        "debug",
        "its size: debug, 150M, 1B, 8B, 32B, 70B, 405B; bench and netlab for tools/bench.py",
    )
    tokenizer_path: str = key(
        "",
        "tiktoken rank file, or a folder with a tokenizer.model (Llama 3's); empty: the embedded",
    )
    tie_embeddings: bool | None = key(
        None, "one matrix for embedding and output; none: as the flavor has it"
    )


@dataclass(frozen=True)
class DataSource:
    type: Literal["python_stdlib", "text", "jsonl", "shards"] = key(
        "python_stdlib",
        "the interpreter's own library; text or JSONL files (plain or .gz); prepared token shards",
    )
    path: tuple[str, ...] = key((), "files, folders or globs; unused for python_stdlib")
    weight: float = key(1.0, "share of the windows, relative to the other sources")
    field: str = key("text", "for jsonl: the field that holds the text")


@dataclass(frozen=True)
class DataConfig:
    sources: tuple[DataSource, ...] = key(
        (DataSource(),), "list of tables {type, path, weight, field}"
    )
    cache_dir: str = key("~/.cache/matrixtitan", "where tokenised text is kept")
    validation_fraction: float = key(0.02, "share of the documents held out for validation")
    on_bad_record: Literal["error", "skip"] = key(
        "error",
        "a malformed record (of a text file over 4 MB a piece) stops the run, or is counted and skipped",
    )
    num_workers: int = key(1, "processes per rank that read ahead; 0 reads in the training process")
    seed: int | None = key(None, "of the data's order; none: debug.seed")
    allow_data_change: bool = key(
        False, "resume although the data or its order is not the checkpoint's"
    )


@dataclass(frozen=True)
class TrainingConfig:
    global_batch_size: int = key(
        0, "sequences in a step, over all ranks and microbatches; required"
    )
    steps: int = key(1000, "optimizer steps in the whole run")
    seq_len: int = key(2048, "tokens in a sequence")
    local_batch_size: int = key(
        1,
        "sequences in one forward pass of one rank; 0: automatic, for any number of ranks "
        "(at most 8192 tokens, or one sequence)",
    )
    max_norm: float = key(1.0, "gradients are clipped to this global norm; 0 only measures")
    dtype: Dtype = key("float32", "of stored weights, gradients and optimizer states")
    mixed_precision_param: Dtype = key("bfloat16", "of weights that compute and travel")
    mixed_precision_reduce: Dtype = key("float32", "in which gradients are summed over ranks")
    gc_freq: int = key(50, "Python garbage is collected every so many steps; 0: never")
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop", "a loss or gradient norm that is not finite: stop, or skip the step"
    )
    max_consecutive_skips: int = key(
        20, "with on_nonfinite skip: the run stops when it has skipped so many steps in a row"
    )


@dataclass(frozen=True)
class OptimizerGroup:
    pattern: str = key("", "full parameter names, with * and ?")
    lr: float | None = key(None, "their peak learning rate; none: as their role has it")
    weight_decay: float | None = key(None, "their decay; none: as their role has it")


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["muon", "shampoo", "soap", "adamw"] = key(
        "muon", "what steps the hidden matrices; AdamW steps the rest"
    )
    lr: float = key(0.02, "peak learning rate of the matrices")
    weight_decay: float = key(0.01, "decoupled decay of the matrices")
    tail_lr: float = key(3e-3, "peak learning rate of everything else")
    tail_weight_decay: float = key(
        0.01, "decoupled decay of everything else; norms and biases have none"
    )
    tail_betas: tuple[float, ...] = key((0.9, 0.95), "AdamW's betas")
    tail_eps: float = key(1e-8, "AdamW's epsilon")
    tail_patterns: tuple[str, ...] = key((), "more parameters for AdamW, by full name")
    per_head_patterns: tuple[str, ...] = key(
        (), "projections orthogonalised head by head, by full name (muon)"
    )
    groups: tuple[OptimizerGroup, ...] = key((), "list of tables {pattern, lr, weight_decay}")
    momentum: float = key(0.95, "muon: momentum")
    nesterov: bool = key(True, "muon: Nesterov momentum")
    ns_steps: int = key(5, "muon: Newton-Schulz steps")
    ns_coefficients: Literal["quintic", "polar_express"] | tuple[tuple[float, ...], ...] = key(
        "quintic", "muon: quintic, polar_express, or a list of triples, one per step"
    )
    ns_dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "muon: dtype of the iterations; auto: bfloat16 on GPUs, float32 on CPUs"
    )
    ns_batch: bool = key(
        True,
        "muon: multiply equal shapes together where the table says; off where bits are compared",
    )
    scale: Literal["original", "match_rms_adamw", "spectral"] = key(
        "original", "muon: how the rate depends on the shape"
    )
    betas: tuple[float, ...] = key((0.95, 0.95), "shampoo, soap, adamw: decay of the moments")
    eps: float = key(
        1e-8, "soap, adamw: added to the root of the second moment; shampoo: added to the roots"
    )
    shampoo_beta: float = key(-1.0, "soap: decay of the factors; negative: the second beta")
    precondition_frequency: int = key(10, "shampoo, soap: steps between new roots or eigenbases")
    start_preconditioning_step: int = key(10, "shampoo: until then the grafted method runs alone")
    max_precond_dim: int = key(
        8192, "soap leaves a longer side without preconditioner, shampoo cuts it into blocks"
    )
    graft: Literal["adam", "none"] = key("adam", "shampoo: whose step size the update takes")
    graft_beta: float = key(0.95, "shampoo: decay of the grafted method's second moment")
    graft_eps: float = key(1e-8, "shampoo: epsilon of the grafted method")
    stagger: bool = key(True, "shampoo, soap: spread the matrices' refreshes over the steps")
    matrix_exchange: Literal["gather_each", "gather_once", "all_to_all"] = key(
        "all_to_all", "fsdp2: how whole matrices come together for muon"
    )


@dataclass(frozen=True)
class LRSchedulerConfig:
    warmup_steps: int = key(200, "linear rise; step warmup_steps runs at the peak")
    total_steps: int | None = key(None, "where the schedule ends; none: training.steps")
    decay_ratio: float | None = key(
        None, "share of the steps that decay, after a stable part; none: all after warm-up"
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = key("linear", "shape of the decay")
    min_lr_factor: float = key(0.0, "the last step's rate, relative to the peak")


@dataclass(frozen=True)
class ParallelismConfig:
    strategy: Literal["matrix_fsdp", "fsdp2", "zero1_owner", "ddp"] = key(
        "matrix_fsdp", "how ranks share the work"
    )
    data_parallel_replicate_degree: int = key(
        1, "copies of the weights; each is sharded over the other ranks (HSDP)"
    )
    data_parallel_shard_degree: int = key(
        -1, "ranks that share one copy; -1: all that the replicas leave"
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default", "free gathered weights after forward: all but the last unit's, all, or none"
    )
    transport: Literal["auto", "grouped", "ring", "star"] = key(
        "auto", "how a unit's weights travel from their owners"
    )
    egress_cap: float = key(
        0.0,
        "most that a rank may hold of a unit, in mean shares, for star between machines; 0: no cap",
    )
    prefetch: int = key(1, "units gathered ahead")
    reduce_each_microbatch: bool = key(
        True, "reduce gradients after each microbatch, or once a step (more memory)"
    )
    fsdp2_transports: Literal["auto", "tuned", "stock"] = key(
        "auto", "fsdp2: its own collectives (stock), or our transports (tuned); auto: tuned on gloo"
    )
    dry_run_world_size: int = key(
        0, "one process runs one rank of a job of this size, without communication"
    )
    dry_run_rank: int = key(0, "which rank it runs")
    tensor_parallel_degree: int = key(1, "not supported: must be 1")
    pipeline_parallel_degree: int = key(1, "not supported: must be 1")
    context_parallel_degree: int = key(1, "not supported: must be 1")


@dataclass(frozen=True)
class CheckpointConfig:
    enable: bool = key(False, "save, and resume from the newest when started again")
    folder: str = key("checkpoint", "inside job.dump_folder")
    interval: int = key(500, "steps between saves")
    keep_latest_k: int = key(10, "older ones are removed; 0 keeps all")
    load_step: int = key(-1, "resume from this step's; -1: the newest complete one")
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled", "train on while a save is written"
    )
    initial_load_path: str = key(
        "", "a checkpoint to begin from, where there is none to resume from"
    )
    initial_load_model_only: bool = key(True, "take only the weights from it")
    exclude_from_loading: tuple[str, ...] = key((), "keys left as they are, with * and ?")
    last_save_model_only: bool = key(False, "the last save holds the weights alone")
    export_dtype: Dtype = key("float32", "of a weights-only save")
    on_error: Literal["stop", "continue"] = key(
        "stop",
        "a save that fails ends the run, or is logged; the last one's failure always ends it",
    )
    skip_corrupt: bool = key(False, "fall back to an older checkpoint where the newest is damaged")


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    mode: Literal["none", "selective", "full"] = key(
        "none", "recompute nothing, some, or all of a block in backward"
    )
    selective_ac_option: str = key(
        "op", "selective: op keeps matrix products; a number N recomputes every Nth block"
    )


@dataclass(frozen=True)
class CompileConfig:
    enable: bool = key(False, "torch.compile each block")


@dataclass(frozen=True)
class CommConfig:
    init_timeout_seconds: int = key(
        300, "a collective may take so long until the first step is done"
    )
    train_timeout_seconds: int = key(100, "and so long afterwards")
    trace_buf_size: int = key(20000, "entries in NCCL's flight recorder; 0: off")


@dataclass(frozen=True)
class MetricsConfig:
    log_freq: int = key(10, "steps between log lines")
    enable_tensorboard: bool = key(True, "write TensorBoard events")
    save_tb_folder: str = key("tb", "inside job.dump_folder")
    peak_flops: float = key(
        0.0, "dense bfloat16 FLOP/s of one device, for MFU; 0: from a table, where known"
    )
    enable_wandb: bool = key(False, "not supported: must be false")


@dataclass(frozen=True)
class ProfilingConfig:
    enable_profiling: bool = key(False, "write a trace every profile_freq steps")
    save_traces_folder: str = key("profile_traces", "inside job.dump_folder")
    profile_freq: int = key(10, "steps between traces")
    enable_memory_snapshot: bool = key(False, "write CUDA memory snapshots")
    save_memory_snapshot_folder: str = key("memory_snapshot", "inside job.dump_folder")


@dataclass(frozen=True)
class ValidationConfig:
    enable: bool = key(False, "measure the loss on held-out data")
    freq: int = key(100, "steps between validations")
    steps: int = key(10, "held-out global batches read each time; -1: all held-out data")
    local_batch_size: int | None = key(
        None, "sequences in one batch of one rank; none: as many as in training"
    )


@dataclass(frozen=True)
class DebugConfig:
    seed: int = key(0, "of weights and, unless data.seed says otherwise, of the data's order")
    deterministic: bool = key(False, "deterministic algorithms only (slower on GPUs)")
    traceback: bool = key(False, "a mistake ends with its traceback, on every rank, for debugging")


@dataclass(frozen=True)
class Config:
    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    compile: CompileConfig = field(default_factory=CompileConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


# --- loading ---------------------------------------------------------------------------------------------------------


def load_config(argv: Sequence[str]) -> Config:
    """The config of a command line: `--config NAME`, then `--section.key value` overrides.

    `--help` and `--print-config` print and raise SystemExit(0). Raises ConfigError.
    """
    arguments = _split_arguments(argv)
    if any(name == "help" for name, _ in arguments):
        print(help_text())
        raise SystemExit(0)
    names = [value for name, value in arguments if name == "config"]
    path = find_config(names[-1] if names else "debug")
    config = config_from_dict(_read_toml(path), str(path))
    overrides = [pair for pair in arguments if pair[0] not in ("config", "print-config")]
    for name, value in overrides:
        config = _override(config, name, value)
    validate(config, f"{path} with the command line's overrides" if overrides else str(path))
    if any(name == "print-config" for name, _ in arguments):
        print(to_toml(config), end="")
        raise SystemExit(0)
    return config


def find_config(name: str) -> Path:
    """`name` as a path, then under train_configs/, each with or without `.toml`."""
    candidates = [
        folder / f"{name}{suffix}" for folder in (Path(), CONFIG_FOLDER) for suffix in ("", ".toml")
    ]
    for path in candidates:
        if path.is_file():
            return path
    shipped = sorted(path.stem for path in CONFIG_FOLDER.glob("*.toml"))
    near = difflib.get_close_matches(Path(name).stem, shipped, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"--config {name}: no such file, and train_configs/ has {', '.join(shipped)}{hint}"
    )


def config_from_dict(data: Mapping[str, Any], where: str) -> Config:
    """A Config from nested tables; `where` names their file in errors. Does not `validate`."""
    sections = {f.name: f for f in dataclasses.fields(Config)}
    built = {}
    for section, table in data.items():
        if section not in sections or not isinstance(table, Mapping):
            raise ConfigError(
                f"{where}: unknown section [{section}]{_nearest(section, list(sections))}"
            )
        built[section] = _from_table(_hints(Config)[section], table, section, where)
    return Config(**built)


def _from_table(cls: type[Any], table: Mapping[str, Any], prefix: str, where: str) -> Any:
    hints = _hints(cls)
    for name in table:
        if name not in hints:
            raise ConfigError(
                f"{where}: unknown key {prefix}.{name}{_nearest(f'{prefix}.{name}', all_keys())}"
            )
    return cls(
        **{
            name: _convert(value, hints[name], f"{prefix}.{name}", where)
            for name, value in table.items()
        }
    )


def _convert(value: Any, hint: Any, name: str, where: str) -> Any:
    """`value` as the type `hint`, strictly: an int is a float, a single value a list of one, and nothing else."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return (
                    None
                    if option is type(None) and value is None
                    else _convert(value, option, name, where)
                )
            except ConfigError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
        options = ", ".join(repr(option) for option in arguments)
        raise ConfigError(
            f"{where}: {name} is {value!r}; choose {options}{_nearest(str(value), list(arguments))}"
        )
    elif origin is tuple:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        return tuple(
            _convert(item, arguments[0], f"{name}[{i}]", where) for i, item in enumerate(items)
        )
    elif dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return _from_table(typing.cast(type[Any], hint), value, name, where)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = float(value)
            if not math.isnan(number):  # it would pass comparisons in `validate`
                return number
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}: {name} must be {type_name(hint)}, not {value!r}")


def _split_arguments(argv: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value) pairs of `--name value` and `--name=value`; flags have an empty value."""
    pairs: list[tuple[str, str]] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument in ("--help", "-h", "--print-config"):
            pairs.append(("help" if argument == "-h" else argument[2:], ""))
            continue
        if not argument.startswith("--"):
            raise ConfigError(
                f"{argument!r} belongs to no option; write --section.key value, and quote values "
                "with spaces"
            )
        name, equals, value = argument[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{name} lacks a value")
            value = rest.pop(0)
        pairs.append((name, value))
    return pairs


def _override(config: Config, name: str, text: str) -> Config:
    where = "command line"
    section, _, option = name.partition(".")
    if name not in all_keys():
        raise ConfigError(f"{where}: unknown key --{name}{_nearest(name, all_keys())}")
    table = getattr(config, section)
    hint = _hints(type(table))[option]
    value = _convert(_parse_value(text, hint, name), hint, name, where)
    return dataclasses.replace(config, **{section: dataclasses.replace(table, **{option: value})})


def _parse_value(text: str, hint: Any, name: str) -> Any:
    """An override's text: a TOML value where it is one and the key takes more than text, else the text itself."""
    options = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    if type(None) in options and text.lower() == "none":
        return None
    if hint is str or typing.get_origin(hint) is Literal:
        return text
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        if text.startswith(("[", "{")):
            raise ConfigError(
                f"command line: --{name} {text!r} is no TOML value; lists are ['a', 'b']"
            ) from None
        return {"True": True, "False": False}.get(text, text)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


# --- checks ----------------------------------------------------------------------------------------------------------


def validate(config: Config, where: str) -> None:
    """Reject what cannot work on any machine, and files that are not here. Raises ConfigError with every problem."""
    problems = list(_problems(config))
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))


def _problems(config: Config) -> Iterator[str]:
    training, parallelism, schedule = config.training, config.parallelism, config.lr_scheduler
    if training.global_batch_size < 1:
        yield (
            f"training.global_batch_size is {training.global_batch_size}; it is required, at least 1: the number of "
            "sequences in a step, over all ranks"
        )
    positive: dict[str, float] = {
        "training.steps": training.steps,
        "training.seq_len": training.seq_len,
        "training.max_consecutive_skips": training.max_consecutive_skips,
        "optimizer.precondition_frequency": config.optimizer.precondition_frequency,
        "optimizer.max_precond_dim": config.optimizer.max_precond_dim,
        "checkpoint.interval": config.checkpoint.interval,
        "metrics.log_freq": config.metrics.log_freq,
        "profiling.profile_freq": config.profiling.profile_freq,
        "validation.freq": config.validation.freq,
        "parallelism.data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "comm.init_timeout_seconds": config.comm.init_timeout_seconds,
        "comm.train_timeout_seconds": config.comm.train_timeout_seconds,
    }
    for name, value in positive.items():
        if value < 1:
            yield f"{name} is {value}; it must be at least 1"
    not_negative: dict[str, float] = {
        "training.local_batch_size": training.local_batch_size,
        "training.max_norm": training.max_norm,
        "training.gc_freq": training.gc_freq,
        "parallelism.prefetch": parallelism.prefetch,
        "parallelism.dry_run_world_size": parallelism.dry_run_world_size,
        "checkpoint.keep_latest_k": config.checkpoint.keep_latest_k,
        "data.num_workers": config.data.num_workers,
        "lr_scheduler.warmup_steps": schedule.warmup_steps,
    }
    for name, value in not_negative.items():
        if value < 0:
            yield f"{name} is {value}; it must not be negative"
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"):
        degree = getattr(parallelism, name)
        if degree != 1:
            yield f"parallelism.{name} is {degree}; matrixtitan has data parallelism only: set it to 1"
    if config.metrics.enable_wandb:
        yield "metrics.enable_wandb: Weights & Biases is not supported; metrics.enable_tensorboard is"
    if parallelism.egress_cap and not parallelism.egress_cap >= 1:
        yield (
            f"parallelism.egress_cap is {parallelism.egress_cap}; write 0 for no cap, or 1 (an even share) or more"
        )
    if parallelism.data_parallel_shard_degree != -1 and parallelism.data_parallel_shard_degree < 1:
        yield (
            f"parallelism.data_parallel_shard_degree is {parallelism.data_parallel_shard_degree}; it must be "
            "at least 1, or -1 for all that the replicas leave"
        )
    if (
        parallelism.strategy in ("ddp", "zero1_owner")
        and parallelism.data_parallel_replicate_degree > 1
    ):
        yield (
            f"parallelism.data_parallel_replicate_degree: strategy {parallelism.strategy} keeps whole "
            "replicas already; set it to 1"
        )
    if parallelism.strategy == "fsdp2" and config.optimizer.name not in ("muon", "adamw"):
        yield (
            f"optimizer.name {config.optimizer.name} needs whole matrices in every step; parallelism.strategy fsdp2 "
            "exchanges them for muon only: use matrix_fsdp"
        )
    if not 0 <= parallelism.dry_run_rank < max(1, parallelism.dry_run_world_size):
        yield f"parallelism.dry_run_rank {parallelism.dry_run_rank} is outside dry_run_world_size"
    if parallelism.dry_run_world_size and config.checkpoint.enable:
        yield "checkpoint.enable: a dry run (parallelism.dry_run_world_size) has no weights worth saving"
    total = schedule.total_steps if schedule.total_steps is not None else training.steps
    if total < training.steps:
        yield f"lr_scheduler.total_steps {total} ends before training.steps {training.steps}; raise it with the steps"
    if schedule.warmup_steps > total:
        yield f"lr_scheduler.warmup_steps {schedule.warmup_steps} exceeds the {total} steps; lower it"
    for name, share in {
        "lr_scheduler.decay_ratio": schedule.decay_ratio or 0.0,
        "lr_scheduler.min_lr_factor": schedule.min_lr_factor,
        "data.validation_fraction": config.data.validation_fraction,
    }.items():
        if not 0 <= share <= 1:
            yield f"{name} is {share}; it must be from 0 to 1"
    if (
        schedule.decay_ratio is not None
        and schedule.warmup_steps + round(total * schedule.decay_ratio) > total
    ):
        yield "lr_scheduler.warmup_steps and decay_ratio overlap; lower one of them"
    validation, checkpoint = config.validation, config.checkpoint
    if validation.steps != -1 and validation.steps < 1:
        yield f"validation.steps is {validation.steps}; it must be at least 1, or -1 for all held-out data"
    if validation.local_batch_size is not None and validation.local_batch_size < 1:
        yield f"validation.local_batch_size is {validation.local_batch_size}; it must be at least 1"
    if checkpoint.load_step < -1:
        yield f"checkpoint.load_step is {checkpoint.load_step}; write a step, or -1 for the newest"
    if checkpoint.initial_load_path and not checkpoint.enable:
        yield "checkpoint.initial_load_path is set, but checkpoint.enable is false; set it to true"
    if checkpoint.keep_latest_k == 1:
        yield "checkpoint.keep_latest_k is 1; keep at least 2, since the newest may be incomplete (0 keeps all)"
    yield from _optimizer_problems(config.optimizer)
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        yield f"activation_checkpoint.selective_ac_option is {option!r}; write op or a number of blocks"
    yield from _missing_files(config)


def _optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    values = [
        *((f"optimizer.{name}", getattr(optimizer, name)) for name in NOT_NEGATIVE),
        *(
            (f"optimizer.groups[{i}].{name}", getattr(group, name) or 0.0)
            for i, group in enumerate(optimizer.groups)
            for name in ("lr", "weight_decay")
        ),
    ]
    for name, value in values:
        if not 0 <= value < math.inf:
            yield f"{name} is {value}; it must be finite and not negative"
    for i, group in enumerate(optimizer.groups):
        if not group.pattern:
            yield f"optimizer.groups[{i}] has no pattern; write which parameters it is for"
    for name in ("tail_betas", "betas"):
        betas = getattr(optimizer, name)
        if len(betas) != 2:
            yield f"optimizer.{name} must hold two numbers"
        for i, beta in enumerate(betas):
            sums = optimizer.name == "shampoo" and name == "betas" and i == 1 and beta == 1
            if not (0 <= beta < 1 or sums):
                yield f"optimizer.{name} holds {beta}; each must be at least 0 and below 1"
    if not 0 <= optimizer.momentum < 1:
        yield f"optimizer.momentum is {optimizer.momentum}; it must be at least 0 and below 1"
    if not optimizer.shampoo_beta < 1:
        yield f"optimizer.shampoo_beta is {optimizer.shampoo_beta}; it must be below 1"
    if not 0 <= optimizer.graft_beta <= 1:
        yield f"optimizer.graft_beta is {optimizer.graft_beta}; it must be from 0 to 1"
    if not 1 <= optimizer.ns_steps < 100:
        yield f"optimizer.ns_steps is {optimizer.ns_steps}; it must be from 1 to 99"
    if not isinstance(optimizer.ns_coefficients, str):
        triples = optimizer.ns_coefficients
        if not triples or any(len(t) != 3 or not all(map(math.isfinite, t)) for t in triples):
            yield "optimizer.ns_coefficients must hold triples of finite numbers, one per step"
        if len(triples) > optimizer.ns_steps:
            yield (
                f"optimizer.ns_coefficients holds {len(triples)} triples for optimizer.ns_steps {optimizer.ns_steps}; "
                "raise the steps or leave triples out"
            )


def tokenizer_file(path: str) -> Path:
    """The rank file that `model.tokenizer_path` means: the file itself, or a folder's tokenizer.model."""
    file = Path(path).expanduser()
    return file / TOKENIZER_NAME if file.is_dir() else file


def _missing_files(config: Config) -> Iterator[str]:
    tokenizer = config.model.tokenizer_path
    embedded = f"To run on the embedded tokenizer and data instead, add {EMBEDDED_OVERRIDES}"
    if tokenizer and not tokenizer_file(tokenizer).is_file():
        yield (
            f"model.tokenizer_path: there is no file {str(tokenizer_file(tokenizer))!r}. Put the model's tiktoken rank "
            "file there (for Llama 3, the tokenizer.model of the original download), or set the key to where it is, "
            f"or to a folder with a file {TOKENIZER_NAME} that is one. {embedded}"
        )
    if not config.data.sources:
        yield "data.sources is empty; name at least one source"
    for index, source in enumerate(config.data.sources):
        if source.weight <= 0:
            yield f"data.sources[{index}].weight is {source.weight}; it must be positive"
        if (source.type == "python_stdlib") != (not source.path):
            yield f"data.sources[{index}]: a source of type {source.type} " + (
                "takes no path" if source.path else "needs a path"
            )
        for path in source.path:
            file = Path(path).expanduser()
            if not (file.exists() or glob.glob(str(file), recursive=True)):
                yield (
                    f"data.sources[{index}].path: nothing matches {path!r}. Put your {source.type} files there, "
                    f"or set the key to a file, folder or glob. {embedded}"
                )


# --- printing --------------------------------------------------------------------------------------------------------


def all_keys() -> list[str]:
    """Every `section.key`, in order."""
    sections = _hints(Config)
    return [
        f"{name}.{option.name}"
        for name in sections
        for option in dataclasses.fields(sections[name])
    ]


def to_toml(config: Config) -> str:
    """The whole config as TOML that loads to the same config. Keys that are none are comments: TOML has no null."""
    lines = []
    for section in dataclasses.fields(Config):
        lines.append(f"[{section.name}]")
        table = getattr(config, section.name)
        for option in dataclasses.fields(table):
            value = getattr(table, option.name)
            lines.append(
                f"# {option.name} is none"
                if value is None
                else f"{option.name} = {_toml_value(value)}"
            )
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # TOML escapes as JSON does, and DEL
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if dataclasses.is_dataclass(value):
        keys = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return (
            "{"
            + ", ".join(f"{name} = {_toml_value(item)}" for name, item in keys if item is not None)
            + "}"
        )
    return repr(value)


def help_text() -> str:
    """Every key with its type, default and meaning."""
    lines = [
        "usage: ./run_train.sh [--config NAME] [--section.key value ...] [--print-config]",
        "",
        "--config NAME    a TOML file, or one of train_configs/ (default: debug)",
        "--print-config   print the resolved config and stop",
        "",
    ]
    for section in dataclasses.fields(Config):
        lines.append(f"[{section.name}]")
        cls = _hints(Config)[section.name]
        for option in dataclasses.fields(cls):
            kind = type_name(_hints(cls)[option.name])
            default = "none" if option.default is None else _toml_value(option.default)
            lines.append(f"  --{section.name}.{option.name}  ({kind}, default {default})")
            lines.append(f"      {option.metadata['doc']}")
        lines.append("")
    return "\n".join(lines)


def type_name(hint: Any) -> str:
    """A type as a user writes of it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(option) for option in arguments)
    if origin is Literal:
        return "|".join(str(option) for option in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if hint is type(None):
        return "none"
    if dataclasses.is_dataclass(hint):
        return "table"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}[hint]


def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _nearest(name: str, options: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
