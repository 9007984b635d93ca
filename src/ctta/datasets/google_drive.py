"""The page on which Google Drive asks to confirm the download of a file too large for its virus scan."""

from contextlib import suppress
from html.parser import HTMLParser
from urllib.parse import urlencode, urljoin


def confirmed_url(page: str, page_url: str) -> str | None:
    """The address that the page's download form leads to, or None if it has no such form."""
    for action, fields in _read(page).forms:
        if "confirm" in fields:  # other forms on the page search or sign in
            target = urljoin(page_url, action)
            return f"{target}{'&' if '?' in target else '?'}{urlencode(fields)}"
    return None


def title_of(page: str) -> str:
    """What the page says it is, such as 'Google Drive - Quota exceeded'."""
    return " ".join(_read(page).title.split())


def _read(page: str) -> "_FormReader":
    reader = _FormReader()
    with suppress(AssertionError):  # how Python's parser stops at some broken markup
        reader.feed(page)
    return reader


class _FormReader(HTMLParser):
    """Collects each form's action and named fields, and the title."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[tuple[str, dict[str, str]]] = []
        self.title = ""
        self._in_form = self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.forms.append((given.get("action", ""), {}))
            self._in_form = True
        elif tag == "input" and self._in_form and "name" in given:
            self.forms[-1][1][given["name"]] = given.get("value", "")
        self._in_title = tag == "title"

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False
        if tag == "form":
            self._in_form = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
