"""The picture of a loss curve."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping, Sequence

from hyper_parallel.train.files import whole_file
from hyper_parallel.train.metrics import StepMetrics


def plot_losses(path: Path, runs: Mapping[str, Sequence[StepMetrics]]) -> bool:
    """Draw the loss of each named run over its steps, held-out losses as dots, as a PNG. False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    # Equal curves lie on each other: the first is drawn wide, so that it shows below the second.
    for index, (name, metrics) in enumerate(runs.items()):
        width, alpha = (4, 0.5) if index == 0 and len(runs) > 1 else (1.5, 1)
        steps, losses = [m.step for m in metrics], [m.loss for m in metrics]
        (line,) = axes.plot(steps, losses, linewidth=width, alpha=alpha, label=name)
        held_out = [(m.step, m.held_out_loss) for m in metrics if m.held_out_loss is not None]
        axes.plot(*zip(*held_out, strict=True), "o", color=line.get_color(), label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    with whole_file(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))
    return True
