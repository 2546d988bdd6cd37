"""Drills as JUnit XML: what passed, what failed, and as an error what proved nothing."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from harness.results import DrillResult


def write_junit(path: Path, results: Sequence[DrillResult]) -> None:
    """One test case a drill. Raises OSError where `path` can't be written."""
    outcomes = [result.judgement.outcome for result in results]
    suite = ElementTree.Element(
        "testsuite",
        name="harness drill",
        tests=str(len(results)),
        failures=str(outcomes.count("failed")),
        errors=str(outcomes.count("inconclusive")),
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname="drill", name=result.drill, time=f"{result.seconds:.3f}"
        )
        reasons = [str(reason) for reason in result.judgement.reasons]
        if reasons:
            tag = "failure" if result.judgement.outcome == "failed" else "error"
            element = ElementTree.SubElement(case, tag, message=reasons[0], type=result.judgement.outcome)
            element.text = "\n".join(reasons)
        ElementTree.SubElement(case, "system-out").text = f"again: {result.command}\n{result.directory}/verdict.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path, encoding="unicode", xml_declaration=True)
