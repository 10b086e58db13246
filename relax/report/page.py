"""What all pages have in common: one style sheet, and strict templates that escape what they show."""

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from relax.report.charts import number


def environment(package: str) -> Environment:
    """For the templates of a package; `style.html` is there for all of them to include."""
    found = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("relax.report", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["number"] = number
    return found
