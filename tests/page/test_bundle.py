"""The page's scripts: files that import each other, put together to one."""

import re
from collections import Counter
from pathlib import Path

import torchlens._page
from torchlens._page.page import bundle

PAGE = Path(torchlens._page.__file__).parent / "js"
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(PAGE.glob("*.js"))}
DEFINED = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (.*)$", re.MULTILINE)


def defined(text: str) -> list[str]:
    """The names that a script defines at its top level; of several in one line, those with a plain
    value.
    """
    found = []
    for line in DEFINED.findall(text):
        found.append(re.match(r"[\w$]+", line).group())
        found += (
            re.findall(r", ([\w$]+) = ", line)
            if "(" not in line.split("=")[0] and "=>" not in line
            else []
        )
    return found


def test_the_page_of_runs_is_put_together_with_what_it_shares() -> None:
    text = bundle(PAGE.parent / "runs_js", "start.js")
    assert "import {" not in text
    assert not re.search(r"^export ", text, re.MULTILINE)
    own = sorted((PAGE.parent / "runs_js").glob("*.js"))
    shared = [PAGE / name for name in ("elements.js", "numbers.js", "scale.js", "sheet.js")]
    for path in [*own, *shared]:
        assert text.count(path.read_text(encoding="utf-8").splitlines()[0]) == 1, path.name
    names = Counter(
        name for path in [*own, *shared] for name in defined(path.read_text(encoding="utf-8"))
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_every_import_names_what_the_other_file_exports() -> None:
    count = 0
    for name, text in SCRIPTS.items():
        for names, source in re.findall(
            r'^import \{ (.*?) \} from "\./(.*?)";$', text, re.MULTILINE
        ):
            for one in names.split(", "):
                count += 1
                assert source in SCRIPTS, (name, source)
                exported = [
                    line for line in SCRIPTS[source].splitlines() if line.startswith("export ")
                ]
                assert any(
                    re.search(rf"(?<![\w$]){re.escape(one)}(?![\w$])", line) for line in exported
                ), (
                    name,
                    one,
                    source,
                )
    assert count > 100


def test_no_name_is_defined_twice() -> None:
    names = Counter(name for text in SCRIPTS.values() for name in defined(text))
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []


def test_everything_is_put_together_once(tmp_path: Path) -> None:
    text = bundle(PAGE, "start.js")
    assert "import {" not in text
    assert not re.search(r"^export ", text, re.MULTILINE)
    for name, own in SCRIPTS.items():
        first_line = own.splitlines()[0]
        assert text.count(first_line) == (0 if name == "together.js" else 1), name
    (tmp_path / "a.js").write_text('import { b } from "./b.js";\nexport const a = 1;\n')
    (tmp_path / "b.js").write_text(
        'import { a } from "./a.js";\nexport function b() { return a; }\n'
    )
    expected = "function b() { return a; }\n\nconst a = 1;\n"
    assert bundle(tmp_path, "a.js") == "given => {\n" + expected + "}"
