"""A noise schedule: alpha = t^p and sigma = 1 - t^p."""

from dataclasses import dataclass

import torch

from convergeflow.flow.schedule import Coefficients, Linear


@dataclass(frozen=True)
class Power(Linear):
    """Fields are options of training: `model.schedule.kind=power model.schedule.power=3`."""

    power: float = 2.0

    def __call__(self, t):
        """From t = 0, all noise, to t = 1, all data."""
        alpha = torch.as_tensor(t, dtype=torch.float64) ** self.power
        return Coefficients(alpha, 1.0 - alpha)

    def time_at(self, log_snr):
        """The inverse: log-SNR = 2 log(alpha/sigma)."""
        return torch.sigmoid(torch.as_tensor(log_snr, dtype=torch.float64) / 2) ** (1 / self.power)

    def describe(self):
        """What is kept in config.json, under the name of the entry point."""
        return {"kind": "power", "power": self.power}
