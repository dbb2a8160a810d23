"""What is planned of every causal language model of Hugging Face, beside the tensor-parallel plans of its authors.

Models are made on the meta device from the default configuration of their type, which for most is that of a published
model, or from the sizes below. "Sharded" is the share of the bytes of all parameters that `tensor=2` cuts. The
hand-written plans are what `model.tp_plan` of transformers says; of their styles those that cut a weight count.

    python benchmarks/coverage.py [--out docs/coverage.md]
"""

from __future__ import annotations

import argparse
import re
import warnings
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Iterator

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hyper_parallel as hp
from hyper_parallel import PlanError, backends
from hyper_parallel.core.plan.model import ModelDescription, describe

RANKS = 2

_LAYERS = {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4}
SIZES: dict[str, dict[str, Any]] = {
    "dots1": {"num_hidden_layers": 4, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon": {
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": _LAYERS | {"num_experts": 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "partial_rotary_factor": 0.5},
    "reformer": {"is_decoder": True},
    "xglm": {"num_attention_heads": 16},
}
"""Where the default configuration makes no model, or one whose heads can't be dealt out to two ranks."""

WHY_NOT = {
    "attention that no rule describes": "axk2 deepseek_v4 diffllama dots3_note dots3_note_text "
    "gemma4_unified_assistant inkling2_loop_text inkling2_text inkling_text",
    "mixers of Mamba, whose kernels take the weight of the last linear": "bamba falcon_h1 granitemoehybrid jamba "
    "nemotron_h",
    "parameters between the modules of a block, or outside of all": "doge dory hrm_text hy_v4",
    "towers for images or sound": "gemma3 got_ocr2 moss_transcribe_diarize phi4_multimodal",
    "inputs of their own for each layer": "gemma3n_text gemma4 gemma4_text",
    "experts that hand tokens on as they are, which every rank would add": "longcat_flash",
}
"""What keeps a type that has a hand-written plan from being planned, and which types."""

HAND_WRITTEN_CUTS = {
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
    "packed_colwise",
    "packed_rowwise",
}


@dataclass(frozen=True)
class Row:
    """What became of one model type. `theirs` is None without a hand-written plan; `ours` is None where refused."""

    model_type: str
    billions: float = 0.0
    theirs: float | None = None
    ours: float | None = None
    missed: tuple[str, ...] = ()
    note: str = ""


def rows() -> Iterator[Row]:
    """All model types of transformers that name a class for causal language models."""
    torch_backend = backends.load("torch")
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(model_type, **SIZES.get(model_type, {}))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        except Exception as error:  # a configuration fails wherever the model's code first stumbles over it
            yield Row(model_type, note=f"not made by default: {type(error).__name__}")
            continue
        yield _row(model_type, describe(model, torch_backend), getattr(model, "tp_plan", None) or {})


def _row(model_type: str, model: ModelDescription, written: dict[str, str]) -> Row:
    sizes = {each.name: each.numel for each in model.parameters}
    total, cut_by_hand = sum(sizes.values()), _cut_by_hand(model, written)
    theirs = sum(sizes[name] for name in cut_by_hand) / total if written else None
    try:
        plan = hp.plan(model, hp.DeviceMesh((RANKS,), ("tensor",)))
    except PlanError as error:
        return Row(model_type, total / 1e9, theirs, note=_first_reason(str(error)))
    cut = {each.name for each in plan.parameters if each.placements}
    missed = tuple(dict.fromkeys(_without_numbers(name) for name in sorted(cut_by_hand - cut)))
    return Row(model_type, total / 1e9, theirs, sum(sizes[name] for name in cut) / total, missed)


def _cut_by_hand(model: ModelDescription, written: dict[str, str]) -> set[str]:
    """Parameters that a hand-written plan cuts: itself named, or its module. A bias behind a row-wise cut is whole."""
    found = set()
    names = [(each.name, each.name, len(each.shape)) for each in model.parameters]
    dims = {each.name: len(each.shape) for each in model.parameters}
    names += [(name, first, dims[first]) for name, first in model.tied.items()]
    for name, first, rank in names:
        plain = _without_numbers(name)
        style = written.get(plain) or written.get(plain.rpartition(".")[0])
        if style in HAND_WRITTEN_CUTS and not (rank == 1 and style.startswith("rowwise")):
            found.add(first)
    return found


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _first_reason(report: str) -> str:
    """The first violation, short enough for a table."""
    lines = report.splitlines()[1:]
    told = sum(line.startswith("[") for line in lines)
    reason = lines[0].partition("; write below")[0].replace("|", "/")
    return f"refused ({told} told): {reason[:150]}"


def _causes(types: set[str]) -> str:
    """Of the types that are not planned how many each cause keeps."""
    causes = [(len(types & set(named.split())), cause) for cause, named in WHY_NOT.items()]
    causes.append((len(types - set(" ".join(WHY_NOT.values()).split())), "something else"))
    return "; ".join(f"{count} for {cause}" for count, cause in causes if count)


def table(found: list[Row]) -> str:
    """Markdown."""
    planned = [each for each in found if each.ours is not None]
    with_theirs = [each for each in found if each.theirs is not None]
    both = [each for each in planned if each.theirs is not None]
    missing = {each.model_type for each in with_theirs if each.ours is None}
    lines = [
        "# Coverage",
        "",
        f"{date.today()}, transformers {transformers.__version__}, torch {torch.__version__}: made by "
        "`python benchmarks/coverage.py --out docs/coverage.md`.",
        "",
        f"Of {len(found)} types of causal language models, {len(planned)} are planned without an override, "
        f"{sum(each.note.startswith('refused') for each in found)} are refused with every parameter that is not known, "
        f"and {sum(each.note.startswith('not made') for each in found)} make no model from their default "
        "configuration.",
        f"{len(with_theirs)} come with a hand-written tensor-parallel plan. Of the {len(both)} that are planned "
        "both ways, ours cuts "
        f"more in {sum(each.ours > each.theirs + 1e-9 for each in both)}, as much in "
        f"{sum(abs(each.ours - each.theirs) <= 1e-9 for each in both)} and less in "
        f"{sum(each.ours < each.theirs - 1e-9 for each in both)}; "
        f"{len(planned) - len(both)} more are planned by ours alone.",
        f"{len(missing)} of the {len(with_theirs)} are not planned: {_causes(missing)}.",
        "",
        "Shares are of the bytes of all parameters, cut over `tensor=2`. That plans compute what the model "
        "computes is held by "
        "`tests/torch/test_hugging_face.py`.",
        "",
        "| Model type | Parameters | By hand | Ours | |",
        "|---|---:|---:|---:|---|",
    ]
    for each in found:
        note = each.note or (f"by hand also: {', '.join(each.missed)}" if each.missed else "")
        size = f"{each.billions:.2f} B" if each.billions else ""
        lines.append(f"| {each.model_type} | {size} | {_percent(each.theirs)} | {_percent(each.ours)} | {note} |")
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a Markdown file")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    text = table(list(rows()))
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
