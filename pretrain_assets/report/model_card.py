"""The model card of an exported model: what it is, how to use it, and exactly which data it saw.

Invariant: prints the lineage it is given and nothing else; what is not known is left out or called so. No path, host or
clock: equal models have equal cards.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from pretrain_assets.config import Recipe, from_dict, lasting
from pretrain_assets.plural import counted
from pretrain_assets.recipes import VOCABULARY_MULTIPLE, num_parameters
from pretrain_assets.report.text import mixture_text

SHOWN_SOURCES = 20
"""Sources in the card's table; the metadata of the weights names more."""

FRONT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
- pretrain-assets
---
"""

USE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained(".") for kind in (AutoModelForCausalLM, AutoTokenizer))
prompt = tokenizer({prompt}, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens={num_tokens}, do_sample=True, top_k=50)[0]))
```

```sh
pretrain sample . --prompt {shell_prompt}
```

Both read this folder (`.`) and nothing from the network. A prompt and its continuation have at most {context} tokens.
"""

MASKED = """\
It was trained with a document mask: in training, attention was confined to the document and positions counted from its
start. Here attention is plain, which is the same for one document; put several into one sequence and they see each
other, as they did not in training.
"""

MAX_IDS = 20
"""Ids of documents left out that the card lists."""
TOKEN_LINES = {
    "tokens_trained": "trained on",
    "tokens_in_holes": "left out: documents chosen one by one, their places kept as holes",
    "tokens_not_reached": "not reached yet",
    "tokens_left_out_partial_step": "left out: not enough for a whole step",
    "tokens_left_out_end_of_split": "left out: ends of splits, not a block in each",
    "tokens_left_out_beyond_splits": "left out: documents that do not divide into the splits",
    "tokens_left_out_thinned": "left out: thinned by the mixture",
    "tokens_padded": "padding beside them",
}
"""Lines of the ledger, and what the card calls them."""


def model_card(lineage: Mapping[str, Any]) -> str:
    """The card, as Markdown with the front matter that the Hugging Face hub reads.

    Args:
        lineage: From `train.provenance`, with the `dtype` of the weights.
    """
    recipe, model = lineage["recipe"], lineage["recipe"]["model"]
    name, prompt = recipe["name"], recipe["sample_prompt"]
    facts = [
        ["architecture", f"GPT-2: {model['n_layer']} layers, {model['n_head']} heads, width {model['n_embd']}"],
        ["parameters", _parameters(lineage)],
        ["context", f"{recipe['data']['seq_len']:,} tokens"],
        ["tokenizer", f"{lineage['tokenizer']['name']}, {lineage['tokenizer']['vocab_size']:,} tokens"],
        ["weights", lineage["dtype"]],
        ["trained", _trained(lineage)],
        ["training loss", f"{lineage['train_loss']:.4f}"],
        ["held-out loss", _held_out_loss(lineage)],
        ["contamination", _contamination(lineage["contamination"])],
        ["checkpoint", f"{lineage['checkpoint']}, pretrain_assets {lineage['code_version']}"],
    ]
    parts = [
        f"# {name}, step {lineage['step']:,}",
        f"A GPT-2 language model trained from scratch on version {lineage['version']} of the LanceDB table "
        f"`{lineage['table']}`. It continues text; it was not tuned to follow instructions.",
        USE.format(
            prompt=json.dumps(prompt, ensure_ascii=False),
            shell_prompt=shlex.quote(prompt),
            num_tokens=min(50, recipe["data"]["seq_len"] // 2),
            context=f"{recipe['data']['seq_len']:,}",
        ),
        "## Model",
        _table(["", name], facts),
        *([MASKED] if model["document_mask"] else []),
        "## Data",
        _data(lineage),
        *_sources(lineage["sources"]),
        *_mixture(lineage),
        *_holes(lineage),
        "### What it saw",
        _seen(lineage),
        "## Recipe",
        f"```json\n{json.dumps(_short(lasting(recipe)), indent=1, ensure_ascii=False)}\n```",
    ]
    return FRONT + "\n" + "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _holes(lineage: Mapping[str, Any]) -> list[str]:
    """What was left out document by document, and of which model it is the replay."""
    holes = from_dict(Recipe, lineage["recipe"]).data.holes
    if not holes:
        return []
    origin = lineage.get("replay_of")
    of = f"This is a counterfactual replay of checkpoint `{origin['checkpoint']}`: the" if origin else "The"
    seen = f" Until step {origin['start_step']:,} it had seen {origin['documents_seen']:,} of them." if origin else ""
    return [
        f"{of} same rows in the same order, with holes in the places of {holes}."
        + (seen if origin and origin["documents_seen"] else "")
    ]


def _short(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe in which many documents left out are only counted; lineage.json has them all."""
    without = recipe["data"].get("without", [])
    if len(without) <= MAX_IDS:
        return recipe
    return {**recipe, "data": {**recipe["data"], "without": f"{len(without):,} ids"}}


def _parameters(lineage: Mapping[str, Any]) -> str:
    """As exported: the vocabulary without padding, the tied head once; and as the trainer counts."""
    recipe, vocab_size = from_dict(Recipe, lineage["recipe"]), int(lineage["tokenizer"]["vocab_size"])
    trained, padding = num_parameters(recipe, vocab_size), -vocab_size % VOCABULARY_MULTIPLE
    if not padding:
        return f"{trained:,}"
    return (
        f"{trained - padding * recipe.model.n_embd:,}; in training {trained:,}, with the vocabulary padded to "
        f"{vocab_size + padding:,} tokens"
    )


def _trained(lineage: Mapping[str, Any]) -> str:
    step, total, epoch = lineage["step"], lineage["total_steps"], lineage["steps_per_epoch"]
    steps = counted(step, "step") if step == total else f"{step:,} of {counted(total, 'step')}"
    epochs = f"{counted(step / epoch, 'epoch', '.3g')} of {counted(epoch, 'step')}"
    return f"{steps}, {lineage['tokens_seen']:,} tokens, {epochs}"


def _contamination(found: Mapping[str, Any] | str) -> str:
    """How many training documents hold an item of an evaluation set, by the columns of the pinned version."""
    if isinstance(found, str):
        return f"{found}; `pretrain decontaminate`, before `pretrain tokenize`, searches for evaluation sets"
    documents, sets = counted(found["documents"], "training document"), ", ".join(found["eval_sets"])
    skipped = f", and {found['not_searched']:,} were not searched" if found["not_searched"] else ""
    return f"{found['contaminated']:,} of {documents} hold an item of the evaluation sets {sets}{skipped}"


def _held_out_loss(lineage: Mapping[str, Any]) -> str:
    loss, at = lineage["val_loss"], lineage["val_loss_step"]
    earlier = f", measured at step {at:,}" if at != lineage["step"] else ""
    return f"{loss:.4f} (perplexity {math.exp(loss):,.2f}){earlier}"


def _data(lineage: Mapping[str, Any]) -> str:
    filters = "\n".join(
        [f"-- trained on\n{lineage['filter']}", f"-- held out for the validation loss\n{lineage['held_out_filter']}"]
    )
    rows = [["table", f"{lineage['table']} ({lineage['table_id']})"], ["version", f"{lineage['version']}"]]
    rows += [["tag", lineage["tag"]], ["pin", f"`{lineage['pin']}`"]]
    return f"{_table(['', 'data'], rows)}\n\nIts rows, by SQL predicate:\n\n```sql\n{filters}\n```"


def _sources(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows and tokens by source, the largest ones."""
    if not sources:
        return ["The table names no sources."]
    licensed = any("license" in source for source in sources)
    rows = [
        [
            source["source"] or "unknown",
            *([source.get("license") or "unknown"] if licensed else []),
            f"{source['num_rows']:,}",
            f"{source['num_tokens']:,}",
            f"{source['share']:.1%}",
        ]
        for source in sources[:SHOWN_SOURCES]
    ]
    headers = ["source", *(["licence"] if licensed else []), "documents", "tokens", "share"]
    more = len(sources) - SHOWN_SOURCES
    return [
        "### Training rows by source",
        _table(headers, rows) + (f"\n\nand {more:,} more in the metadata of the weights" if more > 0 else ""),
        *([] if licensed else ["The table says nothing about licences."]),
    ]


def _mixture(lineage: Mapping[str, Any]) -> list[str]:
    """What was seen of each part of a mixture; nothing without one."""
    text = mixture_text(lineage, tablefmt="github")
    return ["### Mixture", text] if text else []


def _seen(lineage: Mapping[str, Any]) -> str:
    """Exposures, and the ledger's tokens over all epochs entered."""
    seen = lineage["exposures"]
    documents = [
        ["seen once", f"{seen['seen_once']:,}"],
        ["seen more than once", f"{seen['seen_more_than_once']:,}"],
        *([["seen most often", f"{seen['most_times']:,} times"]] if seen["most_times"] > 1 else []),
        ["not seen", f"{seen['not_seen']:,}"],
    ]
    total = Counter({line: 0 for line in ("tokens_in", "tokens_repeated", *TOKEN_LINES)})
    for ledger in lineage["ledger"].values():
        total.update({line: ledger.get(line, 0) for line in total})
    tokens = [[name, f"{total[line]:,}"] for line, name in TOKEN_LINES.items() if total[line]]
    offered = f"{total['tokens_in'] + total['tokens_repeated']:,} in {counted(len(lineage['ledger']), 'epoch')}"
    return f"{_table(['documents', str(seen['documents'])], documents)}\n\n{_table(['tokens', offered], tokens)}"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; what would end a cell is written so that it does not."""
    safe = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in [headers, *rows]]
    return tabulate(safe[1:], headers=safe[0], tablefmt="pipe", disable_numparse=True)
