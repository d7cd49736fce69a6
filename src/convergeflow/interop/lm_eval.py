"""Models of this package in EleutherAI's lm-evaluation-harness, as the model `convergeflow`.

`python -m convergeflow.interop.lm_eval` is the harness's own command line with one model more. Releases of the harness
that read the entry points `lm_eval.models` know the model without it. In Python:

    lm_eval.simple_evaluate(ConvergeFlowLM("sotu-small"), tasks=["my_task"])

A flow has no log-likelihood of a token given those before. What it has is a bound on that of a whole text, so

    log p(continuation | context)  is given as  bound of the context - bound of context and continuation, in nats.

Both are upper bounds of -log p, so their difference is an estimate and no bound. Between answers to one question the
context's part is the same: they are ranked by the bound of the whole text. All texts share one seed of noise, so that
answers of one length are compared under the same noise. docs/lm-eval.md says what that means for the tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from convergeflow import zoo
from convergeflow.device import NAMES, choose_device
from convergeflow.errors import UserError
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems.generation import sampler_arguments
from convergeflow.systems.prompt import place_of
from convergeflow.systems.protocol import LanguageModel
from convergeflow.systems.texts import bound_of_rows

try:
    import lm_eval.models  # noqa: F401  (the harness fills its registry only while that is empty)
    from lm_eval.api.model import LM
    from lm_eval.api.registry import model_registry
except ImportError:
    raise UserError("the harness is not installed: pip install 'convergeflow[lm-eval]'") from None

NAME = "convergeflow"
Row = tuple[int, ...]


class ConvergeFlowLM(LM):
    """Any system of this package with a tokenizer. `pretrained` is a name or folder, or a model that is loaded.

    `repeats` is the number of noise levels of a bound. `greedy=False` leaves out the sample that tells whether a model
    would have written a continuation itself. Everything else is an option of `generate`: preset=sharp,nfe=32.
    """

    def __init__(
        self,
        pretrained: str | LanguageModel = zoo.DEFAULT_MODEL,
        *,
        repeats: int = 32,
        greedy: bool = True,
        seed: int = 0,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, LanguageModel):
            self.name, self.model = pretrained.method, pretrained
        else:
            self.name, self.model = pretrained, zoo.load_model(pretrained, device=_place(device))
        if self.model.tokenizer is None:
            raise UserError(f"{pretrained} has no tokenizer: the harness asks in text")
        self.tokens = self.model.tokenizer
        self.repeats, self.greedy, self.seed, self.options = repeats, greedy, seed, options
        sampler_arguments(self.model, options)  # refuses a wrong option before hours of scoring

    def get_model_info(self) -> dict[str, Any]:  # the harness asks by this name
        """What a record of results has to say."""
        return {"convergeflow": {"model": self.name, "likelihood": self.model.bound_kind, "draws": self.repeats}}

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Per (context, continuation): minus the difference of bounds, and whether the model writes the same there."""
        pairs = [self._pair(*request.args) for request in requests]
        rows = list(dict.fromkeys(row for context, whole in pairs for row in (context, whole) if row))
        nats = dict(zip(rows, self._nats(rows), strict=True))
        written = self._written({(context, len(whole)) for context, whole in pairs}) if self.greedy else {}
        return [
            (nats.get(context, 0.0) - nats[whole], written.get((context, len(whole))) == whole)
            for context, whole in pairs
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Per text: minus its bound. A text longer than the model's sequences is cut into such."""
        return [-value for value in self._nats([self._ids(request.args[0]) for request in requests])]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Per (context, how): what follows the context, up to the first of the strings `until`."""
        return [self._continued(*request.args) for request in requests]

    def _ids(self, text: str) -> Row:
        self.tokens.check_known(text)
        return tuple(self.tokens.encode(text))

    def _pair(self, context: str, continuation: str) -> tuple[Row, Row]:
        """The ids of a context, and of both together; what does not fit is cut off at the beginning."""
        kept = context.rstrip()
        whole = self._ids(kept + context[len(kept) :] + continuation)
        before = min(len(self._ids(kept)), len(whole))
        cut = min(before, max(0, len(whole) - int(self.model.config.length)))
        return whole[cut:before], whole[cut:]

    def _nats(self, rows: Sequence[Row]) -> list[float]:
        if self.model.bound_kind is None:
            raise UserError(f"{self.model.method} has no likelihood bound: only tasks that generate can be run")
        return list(bound_of_rows(self.model, rows, [self.seed] * len(rows), repeats=self.repeats).nats)

    def _written(self, wanted: set[tuple[Row, int]]) -> dict[tuple[Row, int], Row]:
        """What the model writes behind each context up to a length; contexts of one length share network calls."""
        groups: dict[tuple[int, int], list[Row]] = defaultdict(list)
        for context, length in sorted(wanted):
            groups[len(context), length].append(context)
        found: dict[tuple[Row, int], Row] = {}
        for (_, length), contexts in groups.items():
            for context, ids in zip(contexts, self._sample(contexts, length), strict=True):
                found[context, length] = tuple(ids)
        return found

    def _sample(self, contexts: Sequence[Row], length: int) -> list[list[int]]:
        known = torch.tensor(contexts, dtype=torch.long)
        tokens = torch.zeros(len(contexts), length, dtype=torch.long)
        tokens[:, : known.shape[1]] = known
        clamp = Clamp(tokens, (torch.arange(length) < known.shape[1]).expand(len(contexts), length))
        how = sampler_arguments(self.model, self.options, length) | ({"clamp": clamp} if known.numel() else {})
        made = self.model.sample(len(contexts), length, seeds=[self.seed] * len(contexts), **how)
        rows: list[list[int]] = made.ids.tolist()
        return rows

    def _continued(self, context: str, how: dict[str, Any]) -> str:
        size = int(self.model.config.length)
        most = min(int(how.get("max_gen_toks", size // 2)), size - 1)
        known = self._ids(context)[-(size - most) :]
        in_blocks = getattr(self.model.config, "block_length", None) is not None
        ids = self._sample([known], len(known) + most if in_blocks else size)[0][: len(known) + most]
        end = self.tokens.end_id
        if end in ids[len(known) :]:
            ids = ids[: ids.index(end, len(known))]
        # A word has its capital, or its space, by what stands before it: the whole text is read, and the context cut.
        text = self.tokens.decode(ids)
        text = text[place_of(self.tokens, ids, len(known), text) :]
        until = how.get("until") or []
        for stop in [until] if isinstance(until, str) else until:
            text = text.split(stop)[0] if stop else text
        return text


def _place(device: str | None) -> str:
    """A device of this package; the harness names a GPU by its number even where nobody asked and none is there."""
    name = (device or "auto").partition(":")[0]
    try:
        choose_device(name)
    except UserError:
        if name not in NAMES:
            raise
        return "auto"
    return name


if NAME not in model_registry:
    model_registry.register(NAME, target=ConvergeFlowLM)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
