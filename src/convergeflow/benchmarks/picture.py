"""A record as a picture: seconds and memory of the contestants, and the scaling where it was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convergeflow import files

TIMES = ("seconds", "seconds_per_call", "seconds_per_step")
LEFT_OUT = ("gemm",)


def draw(record: dict[str, Any], target: Path) -> None:
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scaling = record.get("scaling", [])
    axes_of_scaling = list(dict.fromkeys(point["axis"] for point in scaling))
    figure, axes = pyplot.subplots(1, 2 + len(axes_of_scaling), figsize=(4.2 * (2 + len(axes_of_scaling)), 3.6))
    label = next(name for name in TIMES if name in record)
    times = {name: value for name, value in record[label].items() if name not in LEFT_OUT}
    axes[0].barh(list(times), list(times.values()), color="tab:blue")
    axes[0].set_title(label.replace("_", " "))
    axes[0].invert_yaxis()
    memory = {name[:-3]: value for name, value in record.items() if name.endswith("_mb") and value is not None}
    axes[1].barh(list(memory), list(memory.values()), color="tab:green")
    axes[1].set_title("memory, MB")
    axes[1].invert_yaxis()
    for axis, name in zip(axes[2:], axes_of_scaling, strict=True):
        points = [point for point in scaling if point["axis"] == name]
        for contestant in points[0]["seconds"]:
            axis.plot(
                [point["value"] for point in points],
                [point["seconds"][contestant] for point in points],
                marker="o",
                label=contestant,
            )
        axis.set(xscale="log", yscale="log", xlabel=name, title=f"seconds by {name}")
        axis.legend(fontsize=7)
    figure.suptitle(f"{record['what']}, {record['name']} size, {record['machine']['processor']}", fontsize=9)
    figure.tight_layout()
    with files.replacing(target) as draft:
        figure.savefig(draft, dpi=110)
    pyplot.close(figure)
