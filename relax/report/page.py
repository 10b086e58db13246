"""What all pages have in common: a frame with one style sheet, figures, and templates that escape what they show."""

import attrs
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from relax.report.charts import number


@attrs.frozen
class Figure:
    """A chart with what stands around it: `value` is the number to take away, in words for people."""

    title: str
    note: str
    value: str
    svg: str


def environment(package: str) -> Environment:
    """For the templates of a package; all of them may extend `page.html` and show figures by `figure.html`."""
    found = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("relax.report", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["number"] = number
    return found
