"""Documents in other formats than text: tiny files made by hand, read by markitdown where it is installed."""

import sys
import zipfile
import zlib

import pytest

from offload.errors import PromptError
from triforce_cli.input import converters
from triforce_cli.input.documents import Document, read_documents, read_prompt

PAGES = ("The first page is about whales.", "The second page is about ships.", "The third page is about the sea.")
CONTAINER = (
    '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="book/content.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
TYPES = (
    '<?xml version="1.0"?><Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/word/document.xml" '
    'ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
RELATIONS = (
    '<?xml version="1.0"?><Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    '<Relationship Id="r1" Target="word/document.xml" '
    'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"/></Relationships>'
)


@pytest.fixture(scope="module")
def markitdown():
    """Its PDF and DOCX parts too; without them these tests have nothing to test."""
    for name in ("pdfplumber", "mammoth"):
        pytest.importorskip(name)
    return pytest.importorskip("markitdown")


def plain(stream):
    return stream, ""


def deflated_twice(stream):
    return zlib.compress(zlib.compress(stream, 9), 9), "/Filter [/FlateDecode /FlateDecode] "


def pdf(path, pages=PAGES, encoded=plain):
    """Pages of one line each, with a correct table of offsets; a page of None is empty, as a scan's is."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, page in enumerate(pages):
        stream = "" if page is None else f"BT /F1 12 Tf 72 700 Td ({page}) Tj ET"
        stream, filters = encoded(stream.encode())
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(stream)} {filters}>>\nstream\n".encode() + stream + b"\nendstream")
    data, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        content = content if isinstance(content, bytes) else content.encode()
        data += f"{number} 0 obj\n".encode() + content + b"\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    data += (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
        f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    ).encode()
    path.write_bytes(data)
    return path


def archive(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in members.items():
            made.writestr(name, content)
    return path


def epub(path, pages=PAGES):
    """The spine's order is not that of the names."""
    names = [f"chapter-{9 - i}.xhtml" for i in range(len(pages))]
    items = "".join(f'<item id="c{i}" href="{n}" media-type="application/xhtml+xml"/>' for i, n in enumerate(names))
    spine = "".join(f'<itemref idref="c{i}"/>' for i in range(len(pages)))
    opf = (
        '<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0">'
        '<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The Sea</dc:title></metadata>'
        f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    chapters = {
        f"book/{name}": f"<html><body><p>{page}</p></body></html>" for name, page in zip(names, pages, strict=True)
    }
    members = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "book/content.opf": opf}
    return archive(path, members | chapters)


def docx(path, pages=PAGES):
    body = "".join(f"<w:p><w:r><w:t>{page}</w:t></w:r></w:p>" for page in pages)
    document = f'<?xml version="1.0"?><w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    return archive(path, {"[Content_Types].xml": TYPES, "_rels/.rels": RELATIONS, "word/document.xml": document})


def html(path, pages=PAGES):
    body = "".join(f"<p>{page}</p>" for page in pages)
    path.write_text(f"<!DOCTYPE html><html><head><script>var no = 1</script></head><body>{body}</body></html>")
    return path


MAKERS = {"pdf": pdf, "epub": epub, "docx": docx, "html": html}


def one(path):
    (document,) = read_documents([path], None, pytest.fail)
    return document


def refused(path):
    with pytest.raises(PromptError) as caught:
        one(path)
    assert path.name in caught.value.message and caught.value.hint
    return caught.value


@pytest.mark.parametrize("kind", MAKERS)
def test_the_text_comes_in_the_order_of_its_pages(markitdown, tmp_path, kind):
    text = one(MAKERS[kind](tmp_path / f"book.{kind}")).text
    places = [text.index(page) for page in PAGES]
    assert places == sorted(places)
    assert not {"<p>", "var no", "\f", "PK"} & {word for word in ("<p>", "var no", "\f", "PK") if word in text}


@pytest.mark.parametrize("kind", ["epub", "docx"])
def test_a_format_is_seen_from_the_bytes(markitdown, tmp_path, kind):
    path = MAKERS[kind](tmp_path / "book.txt")
    assert PAGES[1] in read_prompt("What is it about?", [path], None, pytest.fail).text


def test_a_scan_is_an_error(markitdown, tmp_path):
    assert "without any text" in refused(pdf(tmp_path / "scan.pdf", (None, None))).message


def test_a_corrupt_document_is_an_error(markitdown, tmp_path):
    made = docx(tmp_path / "book.docx")
    made.write_bytes(made.read_bytes()[: made.stat().st_size // 3])
    assert "although its name says so" in refused(made).message
    whole = bytearray(docx(made).read_bytes())
    place = whole.index(b".xml") + 10  # in what follows the first name
    whole[place : place + 60] = bytes(60)
    made.write_bytes(whole)
    assert "cannot be read" in refused(made).message


def test_a_page_source_is_text_if_it_is_called_so(tmp_path):
    assert one(html(tmp_path / "page.txt")).text.startswith("<!DOCTYPE")
    (tmp_path / "notes.md").write_text("A file that begins with %PDF- is a PDF.\n")
    assert one(tmp_path / "notes.md") == Document(
        str(tmp_path / "notes.md"), "A file that begins with %PDF- is a PDF.\n"
    )


def test_without_the_extra_a_hint_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "markitdown", None)  # as if it were not installed
    assert 'pip install ".[documents]"' in refused(html(tmp_path / "page.html")).hint


@pytest.mark.long
def test_a_conversion_has_a_limit_of_memory(markitdown, tmp_path, monkeypatch):
    monkeypatch.setattr(converters, "_SECONDS", 600)
    monkeypatch.setattr(converters, "_MEMORY", 2**30)
    made = pdf(tmp_path / "bomb.pdf", [" " * 2**30], deflated_twice)
    assert made.stat().st_size < 2**14
    assert "MemoryError" in refused(made).message


def test_a_conversion_has_a_limit_of_time(markitdown, tmp_path, monkeypatch):
    monkeypatch.setattr(converters, "_SECONDS", 0.001)
    assert "more than 0 s" in refused(html(tmp_path / "page.html")).message
