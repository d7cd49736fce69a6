"""A grid: times that crowd towards the data."""

import torch


def late_grid(num_steps, schedule):
    """t_i = 1 - (1 - u_i)^2 for midpoints u_i: a float64 tensor of increasing times in [0, 1], one per step."""
    u = (torch.arange(num_steps, dtype=torch.float64) + 0.5) / num_steps
    return 1 - (1 - u) ** 2
