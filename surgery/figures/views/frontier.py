"""frontier.png: what each plan gains on the probe, and what it costs the base's other skills."""

from pathlib import Path

from surgery.figures import plotting
from surgery.records.growth import Growth

FILES = {"refused": ["frontier.png"]}


def refused(growth: Growth, out: Path) -> None:
    """frontier.png."""
    draw_frontier(growth, out / "frontier.png")


def draw_frontier(growth: Growth, path: Path) -> None:
    """Each candidate: the accuracy that it loses on the skill that it costs most (x), and its accuracy on the probe (y)."""
    with plotting.drawing(path, height=3.6, width=6.4) as (figure, axes):
        axis = axes[0, 0]
        axis.axhline(growth.accuracy, color=plotting.CHANCE, lw=1.2, ls=(0, (1, 2)))
        axis.annotate("the base", (0, growth.accuracy), xytext=(4, 3), textcoords="offset points", fontsize=8.5)
        for within, mark, color, label in (
            (True, "o", "#0072B2", "within the bounds"), (False, "x", "#D55E00", "beyond a bound"),
        ):  # fmt: skip
            for tuned, size in ((False, 5), (True, 9)):
                shown = [each for each in growth.candidates if (not each.beyond) == within and bool(each.steps) == tuned]
                if shown:
                    axis.plot(
                        [growth.cost(each) for each in shown], [each.accuracy for each in shown], mark, ms=size, color=color,
                        label=f"{label}, after {shown[0].steps} steps" if tuned else f"{label}, untrained",
                    )  # fmt: skip
        frontier = growth.frontier()
        axis.step(
            [growth.cost(each) for each in frontier], [each.accuracy for each in frontier], where="post", lw=1,
            color=plotting.CHANCE,
        )  # fmt: skip
        for each in (frontier[0], frontier[-1])[: len(frontier)]:
            axis.annotate(
                each.label, (growth.cost(each), each.accuracy), xytext=(5, -11), textcoords="offset points", fontsize=8
            )
        axis.set(xlabel="accuracy lost on the skill that loses most", ylabel=f"{growth.probe['name']}: {plotting.ACCURACY}")
        figure.suptitle("What a gain costs, by plan", fontsize=11, fontweight="bold", ha="left", x=0.01)
        plotting.legend(figure, axis, columns=2)
