"""The report as one HTML page that needs nothing else, and as Markdown."""

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ctta.report.colors import style_sheet
from ctta.report.document import Chapter, Document, over
from ctta.report.plain import markdown_escaped, one_line, published_markdown, to_markdown


def to_html(document: Document) -> str:
    """One page without scripts or links to elsewhere; every name is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["minus"] = lambda text: text.replace("-", "\N{MINUS SIGN}")
    resources = files("ctta.report")
    template = environment.from_string((resources / "page.html").read_text(encoding="utf-8"))
    # Only these are taken as they are: our own style sheet, and what matplotlib drew, which escapes its text.
    style = Markup(style_sheet() + "\n" + (resources / "page.css").read_text(encoding="utf-8"))
    return template.render(document=document, style=style, drawing=Markup, over=over)


def to_markdown_page(document: Document) -> str:
    """The same for a reader of text files, with the pictures beside it."""
    parts = [f"# {markdown_escaped(document.title)}"]
    if not document.chapters:
        parts.append("No cell is complete yet.")
    for chapter in document.chapters:
        parts += _chapter(chapter)
    parts.append("## How it was run")
    for run in document.runs:
        commands = "\n".join(f"    {one_line(command)}" for command in run.commands)
        parts.append(f"{markdown_escaped(run.name)}:\n\n{commands}")
    if document.missing:
        parts.append("## Not in the tables")
        cells = ((cell.run, cell.cell, cell.reason) for cell in document.missing)
        parts.append("\n".join(f"- {' · '.join(markdown_escaped(text) for text in cell)}" for cell in cells))
    return "\n\n".join(parts) + "\n"


def _chapter(chapter: Chapter) -> list[str]:
    section = chapter.section
    parts = [f"## {chapter.number}. {markdown_escaped(chapter.title)}", markdown_escaped(section.protocol)]
    parts += [f"> **{markdown_escaped(warning)}**" for warning in section.warnings]
    parts += [markdown_escaped(chapter.headline), to_markdown(chapter.scores), chapter.caption]
    parts += [markdown_escaped(note) for note in chapter.scores.notes]
    if chapter.scores.has_published_columns:
        parts += ["Published, and in brackets ours minus published:", published_markdown(chapter.scores)]
    first, *others = chapter.pictures
    parts.append(f"![{first.title}]({first.file}.png)\n\n{first.caption}")
    if chapter.classes:
        parts += ["### Classes", to_markdown(chapter.classes), f"{chapter.classes.caption}."]
    if chapter.overlays:
        parts.append(f"![{chapter.overlays.title}]({chapter.overlays.file}.png)\n\n{chapter.overlays.caption}")
    parts += [f"### {chapter.summary.caption}", to_markdown(chapter.summary)]
    parts += [f"![{picture.title}]({picture.file}.png)\n\n{picture.caption}" for picture in others]
    lines = []
    for entry in section.entries:
        name = f"{entry.run}: {entry.label}" if len(section.runs) > 1 else entry.label
        settings = ", ".join(f"{key}={value}" for key, value in entry.settings.items()) or "none"
        network = f"network {markdown_escaped(entry.results[0].source)}"
        lines.append(f"- **{markdown_escaped(name)}** ({over(entry)}; {network}): {markdown_escaped(settings)}")
    parts += ["### Settings", "\n".join(lines)]
    facts = (*chapter.streams, *chapter.environment)
    lines = [f"- {markdown_escaped(name)}: {markdown_escaped(value)}" for name, value in facts]
    parts += ["### Stream and environment", "\n".join(lines)]
    return parts
