"""One picture that compares runs: held-out rewards over the steps of reinforcement, coloured by algorithm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from relax.errors import RelaxError
from relax.report.charts import Points
from relax.report.story import Story

COLORS: Final = ("#1f6fb2", "#c2570c", "#2c7a4b", "#7b4fa3", "#8a6d1d", "#5b6570")
STYLE: Final = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#9aa5af",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e3e5e3",
    "xtick.color": "#5b6570",
    "ytick.color": "#5b6570",
    "ytick.left": False,
}


def write_figure(run_dirs: Sequence[Path], path: Path) -> Path:
    """Draw the runs' held-out reward components side by side, as a picture (.png, .svg, .pdf); returns its path.

    Errors: `RelaxError` for a directory that is not a run's, for runs without a common component, or for a path that
    cannot be written.
    """
    stories = [Story.read(run) for run in run_dirs]
    names = _common_components(stories)
    algorithms = list(dict.fromkeys(_algorithm(story) for story in stories))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.7 * len(names), 3.1), dpi=160, layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            _draw(axes, name, stories, algorithms)
        figure.supxlabel("optimizer steps of reinforcement", fontsize=9, color="#5b6570")
        figure.axes[0].legend(frameon=False, loc="best")
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise RelaxError(f"{path}: cannot be written: {error}") from error
    return path


def _draw(axes: Axes, name: str, stories: Sequence[Story], algorithms: Sequence[str]) -> None:
    """One component: a faint line for each run, and their mean, which carries the label, where the runs share steps."""
    axes.set_title(f"held-out {name}", fontsize=10)
    for algorithm, color in zip(algorithms, COLORS * len(algorithms), strict=False):
        runs = [_from_zero(story.held_out(f"reward/{name}")) for story in stories if _algorithm(story) == algorithm]
        runs = [points for points in runs if points]
        shared = len(runs) > 1 and len({points.steps for points in runs}) == 1
        for index, points in enumerate(runs):
            label = algorithm if not shared and index == 0 else None
            axes.plot(
                points.steps,
                points.values,
                color=color,
                alpha=0.3 if shared else 1,
                label=label,
                lw=1.2 if shared else 2,
            )
        if shared:
            means = [sum(values) / len(values) for values in zip(*(points.values for points in runs), strict=True)]
            axes.plot(
                runs[0].steps, means, color=color, lw=2.2, marker="o", ms=4, label=f"{algorithm}, {len(runs)} runs"
            )


def _from_zero(points: Points) -> Points:
    return Points(tuple(step - points.steps[0] for step in points.steps), points.values)


def _common_components(stories: Sequence[Story]) -> list[str]:
    """The components that some run is trained on and all were evaluated for; without any such, all common ones."""
    common = [name for name in stories[0].components if all(story.held_out(f"reward/{name}") for story in stories)]
    if not common:
        raise RelaxError(f"{stories[0].run_dir}: no reward component was evaluated in all of the runs")
    keys = {key for story in stories if isinstance(keys := story.setting("gdpo_reward_keys"), list) for key in keys}
    return [name for name in common if name in keys] or common


def _algorithm(story: Story) -> str:
    return str(story.setting("advantage_estimator"))
