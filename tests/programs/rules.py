"""`tiebreak rules`: acceptance rules of other projects, and what they say of kept records."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tiebreak.cases.acceptance import OF_GRADIENTS, RULES, Rule
from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import pick
from tiebreak.reports.records import selection, store
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.texts import answers_of, rules_tables


def main(arguments: Sequence[str]) -> int:
    """Run the verb `rules`; see `tiebreak.reports.cli.main`."""
    about = "Acceptance rules in public use, with their sources; of records made with --rules, what they say."
    parser = Parser(prog="tiebreak rules", description=about)
    parser.add_argument("what", nargs="*", metavar="NAME|FILE", help="rules to tell of, or one file of records")
    parser.add_argument("--format", choices=("simple", "github", "latex"), default="simple", help="of the table")
    selection.add_options(parser)
    options = parser.parse_args(arguments)
    files = [Path(each) for each in options.what if each.endswith((".json", ".json.gz")) or Path(each).is_file()]
    if not files:
        if given := next((flag for flag in selection.FILTERS if getattr(options, flag) is not None), None):
            raise UsageError(f"--{given}: it narrows what a file of records says; name one")
        names = pick("rule", ",".join(options.what), RULES, "`tiebreak rules` lists") if options.what else RULES
        print("\n\n".join("\n".join(_rule_lines(name, RULES[name])) for name in names))
        return PASSED
    if len(options.what) > 1:
        raise UsageError(f"{files[0]}: give one file of records alone, and --cases or --kernels to narrow it")
    run = store.read(files[0])
    if not any(map(answers_of, run.records)):
        cure = "run the matrix, or `tiebreak check`, with --rules"
        raise UsageError(f"{files[0]}: no rule was asked of its cells; {cure}")
    (run,) = selection.filtered([run], options)
    grids.show(rules_tables(run), options.format)
    return PASSED


def _rule_lines(name: str, rule: Rule) -> Iterator[str]:
    yield f"{name}{' (and' + OF_GRADIENTS + ')' if rule.gradients else ''}"
    yield f"  {rule.formula}"
    yield f"  {rule.source}"
    if rule.note:
        yield f"  {rule.note}"
