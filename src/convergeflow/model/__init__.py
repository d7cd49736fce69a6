"""The network: token table, trunk, head."""

SIZES: dict[str, dict[str, int]] = {
    "test": {"width": 32, "depth": 2, "heads": 2},
    "small": {"width": 128, "depth": 4, "heads": 4},
    "base": {"width": 768, "depth": 12, "heads": 12},
    "large": {"width": 1024, "depth": 24, "heads": 16},
}
"""Named network sizes; `width`, `depth` and `heads` may still be given one by one."""
