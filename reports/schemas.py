"""`tiebreak schema`: the JSON Schema of a kind of file, made from the classes that read the files."""

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.files import FILES
from tiebreak.reports.records.decode import SCHEMA, Data
from tiebreak.reports.records.record import EVIDENCE, Record, Run

_FIELD = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Run the verb `schema`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak schema", description="The JSON Schema of a kind of file.")
    names = [name for name, kind in FILES.usable().items() if kind.folder is None]
    parser.add_argument("file", choices=names, help="what the file has")
    print(json.dumps(schema_of(parser.parse_args(arguments).file), indent=2))
    return PASSED


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a kind of file; each field is described by its comment."""
    file_type = FILES[name].type
    kinds = [file_type, *(EVIDENCE.values() if file_type is Run else ())]
    (whole, *evidence), parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for kind in _subclasses(Data):
        if kind.__name__ in parts:
            sources = [inspect.getsource(base) for base in kind.__mro__ if issubclass(base, Data)]
            comments = dict(_FIELD.findall("".join(sources)))
            for field, part in parts[kind.__name__]["properties"].items():
                part.setdefault("description", comments.get(field, ""))
    if evidence:
        parts[Record.__name__]["properties"]["evidence"]["properties"] = dict(zip(EVIDENCE, evidence, strict=True))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"tiebreak {name}, schema {SCHEMA}"}
    return {**head, **whole, "$defs": parts}


def _subclasses(kind: type[Data]) -> Iterator[type[Data]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
