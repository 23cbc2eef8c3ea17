"""Documents in other formats than text: tiny files made by hand."""

import sys
import zipfile
import zlib

import pytest

from offload.errors import PromptError
from triforce_cli.input import converters
from triforce_cli.input.conversion import extract
from triforce_cli.input.documents import Document, read_documents

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


def epub(path, pages=PAGES, prefix="", href="chapter-{}.xhtml", item="chapter-{}.xhtml", more=()):
    """A book; the spine's order is not that of the names. `href`, `item`: a chapter in the list, and in the archive."""
    numbers = [9 - i for i in range(len(pages))]
    opened, tag = (f"{prefix}:", f"xmlns:{prefix}") if prefix else ("", "xmlns")
    items = "".join(f'<{opened}item id="c{i}" href="{href.format(i)}"/>' for i in numbers)
    spine = "".join(f'<{opened}itemref idref="c{i}"/>' for i in numbers)
    opf = (
        f'<?xml version="1.0"?><{opened}package {tag}="http://www.idpf.org/2007/opf" version="3.0">'
        f'<{opened}metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The Sea</dc:title></{opened}metadata>'
        f"<{opened}manifest>{items}</{opened}manifest><{opened}spine>{spine}</{opened}spine></{opened}package>"
    )
    made = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "book/content.opf": opf}
    for number, page in zip(numbers, pages, strict=True):
        if page is not None:
            made[f"book/{item.format(number)}"] = f"<html><head><title>x</title></head><body>{page}</body></html>"
    return archive(path, made | dict(more))


def docx(path, pages=PAGES):
    body = "".join(f"<w:p><w:r><w:t>{page}</w:t></w:r></w:p>" for page in pages)
    document = f'<?xml version="1.0"?><w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    return archive(path, {"[Content_Types].xml": TYPES, "_rels/.rels": RELATIONS, "word/document.xml": document})


def html(path, pages=PAGES):
    body = "".join(f"<p>{page}</p>" for page in pages)
    path.write_text(f"<!DOCTYPE html><html><head><script>var no = 1</script></head><body>{body}</body></html>")
    return path


MAKERS = {"pdf": pdf, "epub": epub, "docx": docx, "html": html}


def one(path, warn=pytest.fail):
    (document,) = read_documents([path], None, warn)
    return document


def refused(path):
    with pytest.raises(PromptError) as caught:
        one(path)
    assert path.name in caught.value.message and caught.value.hint
    return caught.value


@pytest.mark.parametrize("kind", MAKERS)
def test_the_text_comes_in_the_order_of_its_pages(tmp_path, kind):
    text, unread = extract(f".{kind}", MAKERS[kind](tmp_path / "book").read_bytes())
    places = [text.index(page) for page in PAGES]
    assert places == sorted(places) and not unread
    assert not any(word in text for word in ("<p>", "var no", "\f", "PK"))


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        ({"prefix": "opf"}, 0),
        ({"href": "Chapter-{}.XHTML"}, 0),
        ({"href": "chapter-{}.xhtml#start"}, 0),
        ({"href": "the%20text\\chapter-{}.xhtml", "item": "the text/chapter-{}.xhtml"}, 0),
        ({"href": "the text/chapter-{}.xhtml", "item": "the text\\chapter-{}.xhtml"}, 0),
        ({"href": "text/../chapter-{}.xhtml"}, 0),
        ({"href": "chapter-{}%23.xhtml?a=1#b", "item": "chapter-{}#.xhtml"}, 0),
        ({"href": "caf\u00e9-{}.xhtml", "item": "cafe\u0301-{}.xhtml"}, 0),
        ({"pages": (PAGES[0], "\0JFIF", *PAGES[1:])}, 1),  # a picture, or encrypted
        ({"pages": (PAGES[0], None, *PAGES[1:])}, 1),  # in the list, and not in the archive
        ({"pages": (PAGES[0], '<img src="map.png" alt="A map"/>', *PAGES[1:])}, 1),
    ],
)
def test_a_book_has_the_chapters_of_its_spine_and_names_those_without_text(tmp_path, changes, unread):
    text, names = extract(".epub", epub(tmp_path / "book.epub", **changes).read_bytes())
    assert [text.count(page) for page in PAGES] == [1, 1, 1] and "The Sea" in text
    assert [name.partition(" ")[0] for name in names] == ["chapter-8.xhtml"] * unread


ENCRYPTION = (
    '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container" xmlns:e="http://www.w3.org/2001/04/xmlenc#">'
    '<e:EncryptedData><e:CipherData><e:CipherReference URI="{}"/></e:CipherData></e:EncryptedData></encryption>'
)


def test_an_encrypted_book_is_refused_and_one_with_scrambled_fonts_is_read(tmp_path):
    def book(uri):
        return epub(tmp_path / "book.epub", more={"META-INF/encryption.xml": ENCRYPTION.format(uri), "book/f.otf": ""})

    assert "it is encrypted" in refused(book("book/chapter-8.xhtml")).message
    assert PAGES[1] in extract(".epub", book("book/f.otf").read_bytes())[0]


def test_pages_without_text_are_counted_and_pictures_alone_are_refused(tmp_path):
    warnings, path = [], pdf(tmp_path / "scan.pdf", (PAGES[0], None, PAGES[1], None))
    assert PAGES[1] in one(path, warnings.append).text
    path.write_bytes(path.read_bytes().replace(b"[4 0 R 6 0 R", b"[4 0 R 0 0 R"))  # page 2 cannot be loaded
    assert PAGES[1] in one(path, warnings.append).text
    assert warnings == [f"{path}: 2 pages without text: page 2, page 4"] * 2
    for kind, pages in (
        ("pdf", (None, None)),
        ("epub", ['<img src="1.png"/>', None]),
        ("html", ['<img src="1.png"/>']),
    ):
        assert extract(f".{kind}", MAKERS[kind](tmp_path / "pictures", pages).read_bytes())[0].strip() == ""
    assert "without any text" in refused(pdf(path, (None,))).message


@pytest.mark.parametrize("kind", ["epub", "docx"])
def test_a_format_is_seen_from_the_bytes(tmp_path, kind):
    assert converters._kind(MAKERS[kind](tmp_path / "book.txt").read_bytes(), ".txt") == f".{kind}"


def test_a_corrupt_document_is_an_error(tmp_path):
    made = docx(tmp_path / "book.docx")
    made.write_bytes(made.read_bytes()[: made.stat().st_size // 3])
    assert "although its name says so" in refused(made).message
    whole = bytearray(docx(made).read_bytes())
    place = whole.index(b".xml") + 10  # in what follows the first name
    whole[place : place + 60] = bytes(60)
    made.write_bytes(whole)
    assert "cannot be read" in refused(made).message


def test_a_page_without_an_encoding_is_read_as_a_text_is():
    assert extract(".html", "<p>Café “x” naïve</p>".encode("cp1252"))[0] == "Café “x” naïve"


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
def test_a_conversion_has_a_limit_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(converters, "_SECONDS", 600)
    monkeypatch.setattr(converters, "_MEMORY", 2**30)
    made = pdf(tmp_path / "bomb.pdf", [" " * 2**30], deflated_twice)
    assert made.stat().st_size < 2**14
    assert "cannot be read" in refused(made).message


def test_a_conversion_has_a_limit_of_time(tmp_path, monkeypatch):
    monkeypatch.setattr(converters, "_SECONDS", 0.001)
    assert "more than 0 s" in refused(html(tmp_path / "page.html")).message
