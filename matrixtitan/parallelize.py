"""From a model on the meta device to one that trains on all ranks.

In order: parameter roles, activation checkpointing, torch.compile, strategy. A strategy is chosen
only here. Every strategy gets the same parameter roles, from the same patterns, so that all
strategies train with the same optimizers. Allocates nothing. Next file: `strategies/base.py`, the
interface of a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase

import torch
from torch.distributed.device_mesh import DeviceMesh

from matrixtitan.activation_checkpoint import apply_activation_checkpointing
from matrixtitan.config import Config
from matrixtitan.fsdp import MixedPrecisionPolicy, fully_shard
from matrixtitan.fsdp.transports import ranks_on_this_machine
from matrixtitan.log import get_logger
from matrixtitan.optim.build import check_patterns
from matrixtitan.plan.cost import rank_bytes
from matrixtitan.plan.planner import PlanSettings, make_plan
from matrixtitan.plan.roles import param_specs
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.predict.degrees import uneven_warning
from matrixtitan.strategies.base import DataParallel
from matrixtitan.strategies.ddp import DDP
from matrixtitan.strategies.dry_run import DryRun
from matrixtitan.strategies.fsdp2 import FSDP2
from matrixtitan.strategies.matrix_fsdp import MatrixFSDPStrategy
from matrixtitan.strategies.zero1_owner import Zero1Owner
from models import build_model
from models.base import LanguageModel

logger = get_logger()


def meta_model(config: Config, vocab_size: int) -> LanguageModel:
    """The config's model on the meta device: shapes only, nothing is allocated."""
    with torch.device("meta"):
        return build_model(
            config.model.name,
            config.model.flavor,
            vocab_size=vocab_size,
            max_seq_len=config.training.seq_len,
            tie_embeddings=config.model.tie_embeddings,
        )


def parallelize(
    model: LanguageModel, config: Config, mesh: DeviceMesh, device: torch.device
) -> DataParallel:
    """The strategy of the config around `model`, which is on the meta device in its stored dtype.

    The caller closes the strategy, since it may have threads. ValueError for a pattern in the
    config that matches no parameter.
    """
    check_patterns([name for name, _ in model.named_parameters()], config.optimizer)
    specs = model_specs(model, config)
    apply_activation_checkpointing(model, config.activation_checkpoint)
    if config.compile.enable:
        compile_blocks(model)
    strategy = BUILDERS[config.parallelism.strategy](model, specs, config, mesh, device)
    return _dry_run(strategy, config, mesh) if config.parallelism.dry_run_world_size else strategy


def unit_of(unit_names: Sequence[Sequence[str]], fqn: str) -> str:
    """Name of the unit that holds parameter `fqn`, as `fully_shard` names it."""
    for names in unit_names:
        if any(fqn.startswith(f"{name}.") for name in names):
            return "+".join(names)
    raise RuntimeError(f"{fqn} is in none of the model's units {list(unit_names)}")


def model_specs(model: LanguageModel, config: Config) -> list[ParamSpec]:
    """Role, unit and block rows of every parameter, in the model's order.

    The patterns of the model and of the config are both applied.
    """
    units = model.unit_names()
    optimizer = config.optimizer
    specs = param_specs(
        [(fqn, tuple(param.shape), param.requires_grad) for fqn, param in model.named_parameters()],
        lambda fqn: unit_of(units, fqn),
        tail_patterns=[*model.tail_patterns, *optimizer.tail_patterns],
        per_head_patterns=dict.fromkeys(optimizer.rule.head_patterns(), model.head_dim),
    )
    _check_heads(model, specs, optimizer.rule.head_patterns())
    return specs


def _check_heads(model: LanguageModel, specs: Sequence[ParamSpec], patterns: Sequence[str]) -> None:
    """ValueError for a pattern that matches a parameter whose rows are no heads."""
    if model.head_patterns is None:
        return
    for fqn in (spec.fqn for spec in specs):
        for pattern in patterns:
            if fnmatchcase(fqn, pattern) and not any(
                fnmatchcase(fqn, heads) for heads in model.head_patterns
            ):
                raise ValueError(
                    f"per_head_patterns: {pattern!r} matches {fqn}, whose rows are no heads; those "
                    f"of {', '.join(model.head_patterns)} are: narrow the pattern"
                )


def plan_settings(config: Config) -> PlanSettings:
    """The settings that a plan's bytes and FLOPs depend on."""
    stored = dtype_of(config.training.dtype).itemsize
    return PlanSettings(
        rule=config.optimizer.rule,
        param_bytes=stored,
        grad_bytes=stored,  # gradients are reduced into the dtype of the stored rows
        state_bytes=stored,
        egress_cap=config.parallelism.egress_cap,
    )


def dtype_of(name: str) -> torch.dtype:
    """The dtype of the config's text `name`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch: write float32 or bfloat16")
    return dtype


def compile_blocks(model: LanguageModel) -> None:
    """Compile each block's `forward`, in place.

    Compiling the module would draw its hooks into the graph and change parameter names.
    """
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, fullgraph=True)


def _matrix_fsdp(
    model: LanguageModel,
    specs: list[ParamSpec],
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
) -> DataParallel:
    parallelism = config.parallelism
    settings = plan_settings(config)
    plan = make_plan(specs, mesh.size(mesh.ndim - 1), settings)
    if mesh.get_rank() == 0 or parallelism.dry_run_world_size:
        per_host = ranks_on_this_machine(mesh.size())
        warning = uneven_warning(specs, plan, settings, mesh.size(), per_host)
        if warning is not None:
            logger.warning(warning)
    runtime = fully_shard(
        model,
        units=model.unit_names(),
        mesh=mesh,
        plan=plan,
        device=device,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype_of(config.training.mixed_precision_param),
            reduce_dtype=dtype_of(config.training.mixed_precision_reduce),
        ),
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        transport=parallelism.transport,
        prefetch=parallelism.prefetch,
        gradient_reduction="sum",
        timeout=_init_timeout(config),
        report=False,
    )
    return MatrixFSDPStrategy(runtime, reduce_each_microbatch=parallelism.reduce_each_microbatch)


def _fsdp2(
    model: LanguageModel,
    specs: list[ParamSpec],
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
) -> DataParallel:
    parallelism = config.parallelism
    return FSDP2(
        model,
        specs,
        units=model.unit_names(),
        mesh=mesh,
        device=device,
        dtype=dtype_of(config.training.dtype),
        param_dtype=dtype_of(config.training.mixed_precision_param),
        reduce_dtype=dtype_of(config.training.mixed_precision_reduce),
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        reduce_each_microbatch=parallelism.reduce_each_microbatch,
        transports=parallelism.fsdp2_transports,
        matrix_exchange=config.optimizer.matrix_exchange,
        prefetch=parallelism.prefetch,
        timeout=_init_timeout(config),
    )


def _zero1_owner(
    model: LanguageModel,
    specs: list[ParamSpec],
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
) -> DataParallel:
    return _replica(Zero1Owner, model, specs, config, device)


def _ddp(
    model: LanguageModel,
    specs: list[ParamSpec],
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
) -> DataParallel:
    return _replica(DDP, model, specs, config, device)


def _replica(
    kind: type[DDP],
    model: LanguageModel,
    specs: list[ParamSpec],
    config: Config,
    device: torch.device,
) -> DataParallel:
    return kind(
        model,
        specs,
        device=device,
        param_dtype=dtype_of(config.training.mixed_precision_param),
        reduce_dtype=dtype_of(config.training.mixed_precision_reduce),
    )


def _dry_run(strategy: DataParallel, config: Config, mesh: DeviceMesh) -> DryRun:
    if strategy.plan is None:
        return DryRun(strategy, None)
    resident = rank_bytes(strategy.plan, plan_settings(config))
    return DryRun(strategy, resident[mesh["dp_shard"].get_local_rank()].total)


def _init_timeout(config: Config) -> timedelta:
    return timedelta(seconds=config.comm.init_timeout_seconds)


Build = Callable[[LanguageModel, list[ParamSpec], Config, DeviceMesh, torch.device], DataParallel]

BUILDERS: dict[str, Build] = {
    "matrix_fsdp": _matrix_fsdp,
    "fsdp2": _fsdp2,
    "zero1_owner": _zero1_owner,
    "ddp": _ddp,
}
"""The strategies, by the name that `parallelism.strategy` takes."""
