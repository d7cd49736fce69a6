"""Text crystallising in the terminal while a flow converges."""

from __future__ import annotations

from typing import Any

import torch

from convergeflow.sampling.cohort import Step


class LiveText:
    """Text crystallising in the terminal: sure tokens bright, unsure ones dim; use as a context manager."""

    def __init__(self, tokenizer: Any, console: Any, samples: int = 3) -> None:
        from rich.live import Live

        self.tokenizer, self.samples = tokenizer, samples
        self._names = tokenizer.tokens() if tokenizer is not None else None
        self._live = Live(console=console, refresh_per_second=12, transient=True)

    def __enter__(self) -> LiveText:
        self._live.__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._live.__exit__(*problem)

    def __call__(self, step: Step) -> None:
        self._live.update(self.render(step))

    def render(self, step: Step) -> Any:
        """The present tokens of the first samples."""
        from rich.panel import Panel
        from rich.text import Text

        token = step.last.token
        if token is None:
            token = step.distances().token
        weight = torch.ones(token.shape) if step.last.top_weight is None else step.last.top_weight.cpu()
        if step.before is not None:
            token = torch.cat([step.before, token], 1)
            weight = torch.cat([torch.ones(step.before.shape), weight], 1)
        text = Text()
        for row in range(min(self.samples, len(token))):
            for ident, sure in zip(token[row].tolist(), weight[row].tolist(), strict=True):
                style = "bold green" if sure > 0.99 else "green" if sure > 0.8 else "yellow" if sure > 0.4 else "dim"
                text.append(self._name(ident) + " ", style=style)
            text.append("\n\n")
        title = f"step {step.index + 1}/{step.num_steps}   t = {step.t:.3f}   log-SNR = {float(-step.at.gamma[0]):.2f}"
        return Panel(text, title=title)

    def _name(self, ident: int) -> str:
        if self._names is None:
            return str(ident)
        return self._names[ident].replace("\u0120", "").replace("\u010a", "\u23ce")


def both(*observers: Any) -> Any:
    """One observer that calls several."""

    def observe(step: Step) -> None:
        for observer in observers:
            observer(step)

    return observe
