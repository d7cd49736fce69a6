"""A system: the next token depends on the one before it, and on nothing else."""

from dataclasses import dataclass

import torch

from convergeflow.systems.rival import Rival, RivalConfig, zero_linear


@dataclass(frozen=True)
class BigramConfig(RivalConfig):
    """Fields here are options of training: `convergeflow train stories --method bigram model.smoothing=0.1`."""

    smoothing: float = 0.0
    """Share of every law that is spread evenly over the vocabulary."""

    def least_parameters(self):
        """Fewer than a network of this size has: a file that cannot be its weights is refused before it is built."""
        return self.vocabulary**2


class BigramModel(Rival):
    method = "bigram"
    config_class = BigramConfig
    bound_kind = "exact"  # row_losses is the negative log-likelihood itself

    def __init__(self, config):
        super().__init__(config)
        self.network = zero_linear(config.vocabulary, config.vocabulary)  # a fresh model is the uniform law

    def log_law(self, before):
        """log p(next token | token before) [B, V]; an id of -1 stands for the start, of which the bias knows."""
        one_hot = torch.nn.functional.one_hot(before.clamp_min(0), self.config.vocabulary).to(self.network.weight)
        law = self.network(one_hot * (before >= 0)[:, None]).softmax(-1)
        return (law * (1 - self.config.smoothing) + self.config.smoothing / self.config.vocabulary).log()

    def row_losses(self, tokens, times, draws):
        """Nats per token of each row; `times` is for systems with noise."""
        before = torch.cat([torch.full_like(tokens[:, :1], -1), tokens[:, :-1]], 1)
        laws = self.log_law(before.flatten()).view(*tokens.shape, -1)
        return -laws.gather(-1, tokens[..., None])[..., 0].mean(-1)

    def generate_batch(self, run):
        """Token after token; `run` has the rows' random numbers, the known tokens, and counts network calls."""
        rows = torch.full((run.rows, run.length), -1)
        for place in range(run.length):
            before = rows[:, place - 1] if place else rows[:, 0]
            clocks = run.draws.log_exponential(self.config.vocabulary)  # the first of the clocks to ring is a draw
            rows[:, place] = (clocks.to(run.device) - self.log_law(before)).argmin(-1)
            rows[:, : place + 1] = run.put(rows.clamp_min(0))[:, : place + 1]
            run.report(place, run.length, (place + 1) / run.length, rows.clamp_min(0))
        return rows
