"""Files of every kind that is read, and files that are made to do harm, as bytes."""

import io
import resource
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from chunkweave.retrieval.conversion import Conversion, FileRead

_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Default Extension="xml" ContentType="application/xml"/></Types>'
)


def read_bytes(
    conversion: Conversion,
    name: str,
    data: bytes,
    *,
    bounded: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> FileRead:
    """What a conversion makes of a file with these bytes."""
    with TemporaryFile() as file:
        file.write(data)
        file.flush()
        return conversion.read(name, file, bounded=bounded, stopped=stopped)


def pdf(pages: Sequence[str], *, kids: str = "") -> bytes:
    """A PDF with a line of text a line; `kids` are references in the place of those to its pages."""
    count = len(pages)
    own = kids or " ".join(f"{4 + 2 * number} 0 R" for number in range(count))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{own}] /Count {len(own.split()) // 3} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        lines = " ".join(f"({line}) Tj T*" for line in text.split("\n"))
        shown = f"BT /F1 12 Tf 72 720 Td 14 TL {lines} ET"
        about = f"/Contents {5 + 2 * number} 0 R /Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {about} >>")
        objects.append(f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream")
    return pdf_of(objects)


def pdf_of(objects: Sequence[str]) -> bytes:
    """A PDF of objects, the first of which is its catalog."""
    written, offsets = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, start=1):
        offsets.append(len(written))
        written += f"{number} 0 obj\n{one}\nendobj\n".encode("latin-1")
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer << /Size {size} /Root 1 0 R >>\n"
    return written + f"{end}startxref\n{len(written)}\n%%EOF".encode()


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of a Word document."""
    how = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{how}<w:r><w:t>{text}</w:t></w:r></w:p>"


def docx(body: str, *, declared: str = "", relations: str = "", more: dict[str, bytes] | None = None) -> bytes:
    """A Word document; `declared` comes in front of its XML, `relations` beside its parts, `more` are files in it."""
    document = f'{declared}<w:document xmlns:w="{_WORD}" xmlns:r="{_OFFICE}"><w:body>{body}</w:body></w:document>'
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="Heading{level}"><w:name w:val="heading {level}"/></w:style>'
        for level in (1, 2)
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", _TYPES)
        target = f'<Relationship Id="r1" Type="{_OFFICE}/officeDocument" Target="word/document.xml"/>'
        archive.writestr("_rels/.rels", f'<Relationships xmlns="{_RELATIONS}">{target}</Relationships>')
        own = f'<Relationship Id="s1" Type="{_OFFICE}/styles" Target="styles.xml"/>{relations}'
        archive.writestr("word/_rels/document.xml.rels", f'<Relationships xmlns="{_RELATIONS}">{own}</Relationships>')
        archive.writestr("word/styles.xml", f'<w:styles xmlns:w="{_WORD}">{styles}</w:styles>')
        archive.writestr("word/document.xml", document)
        for name, data in (more or {}).items():
            archive.writestr(name, data)
    return packed.getvalue()


READABLE: dict[str, tuple[str, bytes]] = {
    "plain.txt": ("The lighthouse lamp was lit by Adela Quist.", b""),
    "notes.txt": ("The net loft burned down in 1911.", b""),
    "guide.md": ("Mooring costs four crowns a night.", b"# Harbour\n\n%s\n"),
    "rules.md": ("Dogs stay on the southern quay.", b"Rules\n\n## Animals\n\n%s\n"),
    "rows.jsonl": ("Otto Gunmark leads the choir.", b'{"text": "%s", "id": "choir"}\n{"text": "Another row."}\n'),
    "lines.ndjson": ("The organ has thirty stops.", b'{"text": "%s"}\n'),
    "table.csv": ("Brita Lund", b"name,post\n%s,ferry master\nKarl Berg,pilot\n"),
    "prices.csv": ("smoked herring", b"ware;price\n%s;12\nsalt;3\n"),
    "page.html": (
        "The museum opens at ten.",
        b"<html><head><title>Museum</title><script>evil()</script></head>"
        b"<body><h1>Hours</h1><p>%s</p><style>p{}</style></body></html>",
    ),
    "other.htm": ("The bakery sells rye bread.", b"<!doctype html><body><h2>Bread</h2><p>%s</p></body>"),
    "german.txt": ("Die Fähre fährt um neun über den Fluß, täglich außer sonntags.", b""),
    "chinese.txt": ("渡轮每天上午九点离开北码头。合唱团星期日在教堂后面的大厅唱歌。", b""),
    "wide.txt": ("The viaduct has forty arches.", b""),
}
"""By name: what is found in a file, and the file around it. PDF, DOCX and those in other encodings are made below."""


def readable_files() -> dict[str, tuple[bytes, str]]:
    """Two files of each kind, a log of 2 MB, files in several encodings: bytes by name, and what is found in each."""
    encodings = {"german.txt": "cp1252", "chinese.txt": "gb18030", "wide.txt": "utf-16"}
    files = {}
    for name, (said, around) in READABLE.items():
        text = said.encode(encodings.get(name, "utf-8"))
        files[name] = (around.replace(b"%s", text) if around else text, said)
    files["report.pdf"] = (
        pdf(["The first page is about tides.", "The pilot station has a red roof."]),
        "The pilot station has a red roof.",
    )
    files["memo.pdf"] = (pdf(["The anchor weighs two tonnes."]), "The anchor weighs two tonnes.")
    files["letter.docx"] = (
        docx(paragraph("Storms", "Heading1") + paragraph("The great storm came in March 1907.")),
        "The great storm came in March 1907.",
    )
    files["minutes.docx"] = (docx(paragraph("The council bought a fire pump.")), "The council bought a fire pump.")
    files["wrong.txt"] = (pdf(["This document has the wrong suffix, zanzibar."]), "wrong suffix, zanzibar")
    line = "2024-05-01 12:00:00 INFO nothing happened at the gate\n"
    log = line * (1 << 15) + "2024-05-01 12:30:00 ERROR the quokka escaped from the gate\n" + line * 6000
    files["server.log"] = (log.encode(), "the quokka escaped")
    return files


def write_files(folder: Path) -> dict[str, str]:
    """The same as files, with an empty one and a picture beside them; what is found in each, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = readable_files()
    for name, (data, _) in files.items():
        (folder / name).write_bytes(data)
    (folder / "empty.txt").write_bytes(b"")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    return {name: said for name, (_, said) in files.items()}


def zip_bomb() -> bytes:
    """A Word document of 200 KB that unpacks to 200 MB."""
    return docx(paragraph("a" * (200 << 20)))


def entity_bomb() -> bytes:
    """A Word document whose XML has a text that doubles forty times."""
    entities = "".join(f'<!ENTITY e{number + 1} "&e{number};&e{number};">' for number in range(40))
    return docx(paragraph("&e40;"), declared=f'<!DOCTYPE d [<!ENTITY e0 "ferry">{entities}]>')


def outside_entity(url: str) -> bytes:
    """A Word document whose XML names an entity at a URL."""
    return docx(paragraph("&outside;"), declared=f'<!DOCTYPE d [<!ENTITY outside SYSTEM "{url}">]>')


def remote_picture_docx(url: str) -> bytes:
    """A Word document with a picture that is elsewhere."""
    drawing = (
        "<w:p><w:r><w:t>The picture shows the pier.</w:t></w:r><w:r><w:drawing>"
        '<wp:inline xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing">'
        '<a:graphic xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"><a:graphicData>'
        '<pic:pic xmlns:pic="http://schemas.openxmlformats.org/drawingml/2006/picture"><pic:blipFill>'
        '<a:blip r:link="p1"/></pic:blipFill></pic:pic></a:graphicData></a:graphic></wp:inline></w:drawing></w:r></w:p>'
    )
    relation = f'<Relationship Id="p1" Type="{_OFFICE}/image" Target="{url}" TargetMode="External"/>'
    return docx(drawing, relations=relation)


def remote_picture_html(url: str) -> bytes:
    """A web page that would load a picture, a frame, a style and a script from elsewhere."""
    outside = f'<img src="{url}"><iframe src="{url}"></iframe><link rel="stylesheet" href="{url}">'
    return f'<html><body><p>The picture shows the pier.</p>{outside}<script src="{url}"></script></html>'.encode()


def endless_pdf() -> bytes:
    """A PDF of 200 KB with one page that takes long, ten thousand times over."""
    page = pdf(["\n".join(f"Line {number} of a page that is here many times." for number in range(600))])
    return page.replace(b"/Kids [4 0 R] /Count 1", b"/Kids [" + b"4 0 R " * 10_000 + b"] /Count 10000")


def page_of_elements() -> bytes:
    """A web page of 2 MB whose elements take a hundred times as much memory."""
    return b"<html><body>" + b"<p>word</p>" * 200_000


def page_of_faces() -> bytes:
    """A web page of 10 MB whose text, as JSON, takes three times as much: as much as a converter may write."""
    return "<html><body>{}".format("\U0001f600" * 2_600_000).encode()


def children_s() -> float:
    """Processor time of the processes that this one has started and that have ended, in seconds.

    Where nothing else computes, a conversion takes as long by the clock.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


HOSTILE: dict[str, Callable[[], bytes]] = {
    "bomb.docx": zip_bomb,
    "entities.docx": entity_bomb,
    "endless.pdf": endless_pdf,
}

GREEDY: dict[str, Callable[[], bytes]] = {
    **HOSTILE,
    "elements.html": page_of_elements,
    "faces.html": page_of_faces,
}
"""Files that would take much memory."""
