"""Documents of text in a Debian package: markup of prose stripped, source code as it is.

A document is a pair of a path and its text. Archives inside a package are opened.
"""
import gzip
import hashlib
import html
import io
import re
import subprocess
import tarfile
import zipfile

CODE = frozenset(
    "c h cc cpp cxx hh hpp hxx ipp tcc s py pyx rs go java scala kt js mjs ts jsx tsx rb pl pm t el lisp lsp cl scm "
    "rkt hs ml mli erl hrl ex exs pas pp lpr inc adb ads f f90 r R jl lua tcl sh m swift cs d dart sql cmake".split()
)
HTML = frozenset("html htm xhtml".split())
XML = frozenset("xml dbk docbook page xhp".split())
PLAIN = frozenset("txt rst md pod org text adoc".split())
ARCHIVES = (".tar.xz", ".tar.gz", ".tar.bz2", ".tgz", ".tar")

# Pages that list what other pages say, and sources in HTML, which are code.
LISTS = re.compile(
    r"/(genindex|search|py-modindex|doc-index|index-all|all|allclasses[^/]*|overview-tree|package-tree|package-use"
    r"|deprecated-list|constant-values|serialized-form|help-doc|hierarchy|classes|annotated|functions[^/]*|globals[^/]*"
    r"|inherits|pages|files|print|doc-index-[^/]*|index-[0-9]+)\.x?html?$"
    r"|/(class-use|src-html|_modules|_sources|theindex)/|/src/.*\.rs\.html$|/libraries/[^/]+/src/|_source\.html$|-members\.html$|_8[a-z+]+\.html$",
    re.IGNORECASE,
)

LICENSE = re.compile(r"licen[cs]e|copyright|\(c\)|spdx|all rights reserved|redistribut|permission", re.IGNORECASE)
# The first comment of a source file: of C's kind, or lines that begin alike.
HEADERS = [
    re.compile(r"\A(?:#!.*\n)?\s*/\*.*?\*/[ \t]*\n?", re.DOTALL),
    re.compile(r"\A(?:#!.*\n)?\s*(?://|#|;|--|%|\"|!)[^\n]*\n(?:[ \t]*(?://|#(?![a-z!])|;|--|%|\"|!)[^\n]*\n|[ \t]*\n)*"),
    re.compile(r"\A\s*\(\*.*?\*\)[ \t]*\n?", re.DOTALL),
    re.compile(r"\A\s*\{[^$].*?\}[ \t]*\n?", re.DOTALL),
]

# Longest text that is taken as one document, in bytes, and the longest file that is read.
LONGEST = 400_000
LONGEST_FILE = 40_000_000


def digest(text):
    """64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def chosen(path, share):
    """True for about a `share` of all paths."""
    return share >= 1.0 or digest(path) < share * 2.0**64


DROPPED = re.compile(
    r"<!--.*?-->|<(head|script|style|nav|header|footer|aside|form|button|select|svg|noscript|template|annotation)\b[^>]*>.*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
MAIN = re.compile(
    r"<main\b|<section id=\"main-content\"|<div[^>]+(?:role=\"main\"|class=\"(?:body|document|content|contents|article|maincolumn|main)\""
    r"|id=\"(?:content|doc-content|mw-content-text|main-content|bodyContent|bodycontent)\")",
    re.IGNORECASE,
)
END = re.compile(
    r"</main\s*>|<div[^>]+class=\"(?:sphinxsidebar|navfooter|NAVFOOTER|related|footer|clearer|bottomNav|printfooter|navigation|topnav|subNav)\"|<div[^>]+id=\"(?:nav-path|footer)\"",
    re.IGNORECASE,
)
NAVIGATION = re.compile(r"<(div|ul|table)[^>]+class=\"(?:nav\w*|toc|contents|sidebar|breadcrumbs?|header|topNav|tocset\w*|navsettop|navsetbottom)\"[^>]*>.*?</\1>", re.DOTALL | re.IGNORECASE)
PRE = re.compile(r"<(pre|programlisting|screen)\b[^>]*>(.*?)</\1\s*>", re.DOTALL | re.IGNORECASE)
LINES = re.compile(r"<(?:br|/li|/tr|/dt|/dd|/entry|/row|li|dt|dd|tr)\b[^>]*>", re.IGNORECASE)
CELLS = re.compile(r"</?(?:td|th)\b[^>]*>", re.IGNORECASE)
BLOCKS = re.compile(
    r"</?(?:p|div|h[1-6]|ul|ol|dl|table|section|article|blockquote|hr|para|title|sect\d|chapter|simpara|listitem|itemizedlist"
    r"|variablelist|note|tip|warning|important|caution|refsect\d|refnamediv|body|main|details|summary|figure|caption|tbody"
    r"|paragraph|bookmark)\b[^>]*>",
    re.IGNORECASE,
)
TAGS = re.compile(r"<[^>]*>")
SPACES = re.compile(r"[ \t\r\n\f\v\u00a0]+")


def from_html(text):
    """The text of a page, without navigation: a paragraph for each block, code as it is."""
    main = MAIN.search(text)
    if main:
        text = text[main.start() :]
        end = END.search(text, 20)
        # A page that has its bars at the top too.
        if end and end.start() > 200:
            text = text[: end.start()]
    text = NAVIGATION.sub(" ", DROPPED.sub(" ", text))
    parts, last = [], 0
    for code in PRE.finditer(text):
        parts.append(flowing(text[last : code.start()]))
        parts.append("\n\n" + html.unescape(TAGS.sub("", code[2])).strip("\n") + "\n\n")
        last = code.end()
    parts.append(flowing(text[last:]))
    return "".join(parts).replace("\u00b6", "")


def flowing(text):
    text = SPACES.sub(" ", text)
    text = BLOCKS.sub("\n\n", LINES.sub("\n", CELLS.sub(" ", text)))
    return html.unescape(TAGS.sub("", text))


ROFF_TEXT = re.compile(r"\.\s*(?:B|I|BR|RB|BI|IB|IR|RI|SM|SB|TP|IP|SH|SS|Sh|Ss|Nm|Nd|Fl|Ar|Xr|Em|Li|Dq|Sq|Qq|Pa|Va|Fn|Ql|It|Cm|Ev|Er|Sy|Ic)\b ?(.*)")
ROFF_HEADING = re.compile(r"\.\s*(?:SH|SS|Sh|Ss)\b")
ROFF_BREAK = re.compile(r"\.\s*(?:PP|P|LP|Pp|TP|IP|It|HP|br|sp|RS|RE|nf|fi|Bl|El|Bd|Ed)\b")
ROFF_ESCAPE = re.compile(r"\\f(?:\[\w*\]|\(\w\w|.)|\\s[-+]?\d|\\&|\\[/|^,%:c]|\\m\[\w*\]")
ROFF_CHARS = {"\\-": "-", "\\(aq": "'", "\\(dq": '"', "\\e": "\\", "\\ ": " ", "\\~": " ", "\\(bu": "*", "\\(em": "--", "\\(en": "-",
              "\\(co": "(c)", "\\(lq": '"', "\\(rq": '"', "\\(oq": "'", "\\(cq": "'", "\\(ti": "~", "\\(ha": "^", "\\(rs": "\\", "\\'": "'", "\\`": "`", "\\.": "."}


def from_roff(text):
    """The text of a manual page."""
    lines = []
    for line in text.split("\n"):
        if line.startswith((".\\\"", "'\\\"", ".TH", ".Dd", ".Dt", ".Os", ".de", ".ie", ".el", ".if", ".ds", ".nr", ".hy", ".ad")):
            continue
        if line.startswith("."):
            found = ROFF_TEXT.match(line)
            if ROFF_BREAK.match(line) or ROFF_HEADING.match(line):
                lines.append("")
            if not found or not found[1]:
                continue
            line = found[1].replace('"', "")
            if ROFF_HEADING.match(found[0]):
                lines += [line, ""]
                continue
        for escape, char in ROFF_CHARS.items():
            line = line.replace(escape, char)
        lines.append(ROFF_ESCAPE.sub("", line))
    return "\n".join(lines)


WORDNET = re.compile(r"^\d{8} \d\d \w [0-9a-f]{2} (.*?) \d{3} .*?\| (.*)$")


def from_wordnet(text):
    """Words and their definitions, of WordNet's files of data."""
    entries = []
    for line in text.split("\n"):
        found = WORDNET.match(line)
        if found:
            words = [word.replace("_", " ") for word in found[1].split()[::2]]
            entries.append(f"{', '.join(words)}: {found[2].strip()}")
    return "\n\n".join(entries)


POD = re.compile(r"[A-Z]<{1,3}\s?((?:[^<>]|<[^<>]*>)*?)\s?>{1,3}")


def from_plain(text, suffix):
    if suffix == "pod":
        text = re.sub(r"^=(?:head\d|item|over|back|encoding|begin|end|for|pod|cut)\b ?", "", text, flags=re.MULTILINE)
        text = POD.sub(r"\1", POD.sub(r"\1", text))
    elif suffix == "rst":
        text = re.sub(r"^[=\-~^\"'`#*+.:_]{4,}$", "", text, flags=re.MULTILINE)
        text = re.sub(r"^\.\. (?:_[^\n]*:|[\w-]+::[^\n]*)$", "", text, flags=re.MULTILINE)
        text = re.sub(r":[\w:+-]+:`([^`<]*)(?:<[^>]*>)?`", r"\1", text).replace("``", "")
    return text


def without_header(text):
    """A source file without the licence at its beginning."""
    for header in HEADERS:
        found = header.match(text)
        if found and found.end() < 20_000 and LICENSE.search(found[0]):
            return text[found.end() :].lstrip("\n")
    return text


def decoded(data):
    if b"\0" in data[:4096]:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None if len(re.findall(rb"[\x80-\xff]", data[:20_000])) > 1_000 else data.decode("latin-1")


def is_readable(text, kind):
    """False for tables of numbers, generated and minified files, and scripts that the vocabulary is not made for."""
    size = len(text)
    if size < 200:
        return False
    sample = text[:20_000]
    letters = sum(map(str.isalpha, sample))
    foreign = sum(char > "\u024f" for char in sample)
    if foreign > 0.03 * len(sample) or letters < (0.45 if kind == "code" else 0.5) * len(sample):
        return False
    if kind == "code":
        lines = text.split("\n")
        if max(map(len, lines)) > 2_000 or size / len(lines) > 120:
            return False
        if re.search(r"do not edit|generated by|autogenerated|@generated", text[:1_500], re.IGNORECASE):
            return False
    return True


BLANK = re.compile(r"[ \t]+\n")
GAPS = re.compile(r"\n{3,}")


def document(path, data, kind):
    """The text of a file of `kind`, or None if it has none."""
    name = path.rsplit("/", 1)[-1]
    suffix = name.rsplit(".", 1)[-1] if "." in name else ""
    is_manual = "/man/man" in path
    is_dictionary = "/dictd/" in path and suffix == "dz"
    if suffix == "gz" and not is_dictionary:
        path = path[:-3]
        name = path.rsplit("/", 1)[-1]
        suffix = name.rsplit(".", 1)[-1] if "." in name else ""
        is_compressed = True
    else:
        is_compressed = False
    is_info = bool(re.search(r"\.info(-\d+)?$", name))
    is_wordnet = path.startswith("usr/share/wordnet/data.")
    # Documents in a tree of plain text without suffixes: fortunes, the Bible.
    is_bare = kind == "prose" and suffix == "" and bool(re.search(r"/(games/fortunes|bible-kjv|doc/RFC|miscfiles)/", path))
    is_changes = bool(re.search(r"^usr/share/doc/.*/(NEWS|changelog|README)[^/]*$", path)) and "Debian" not in name
    if kind == "code":
        if suffix not in CODE:
            return None
    elif not (suffix in HTML or suffix in XML or suffix in PLAIN or is_manual or is_info or is_dictionary or is_wordnet or is_bare or is_changes):
        return None
    if kind == "prose" and (LISTS.search("/" + path) or name in ("copyright", "COPYING", "LICENSE")):
        return None
    if is_compressed or is_dictionary:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError):
            return None
    text = decoded(data)
    if text is None:
        return None
    text = text.replace("\r\n", "\n").replace("\ufeff", "")
    if kind == "code":
        text = without_header(text)
    elif suffix in HTML or suffix in XML:
        text = from_html(text)
    elif is_manual:
        text = from_roff(text)
    elif is_wordnet:
        text = from_wordnet(text)
    elif is_info:
        text = re.sub(r"\x1f[^\n]*\n?(?:File: [^\n]*\n)?|\x00\x08\[[^\]]*\x00\x08\]", "\n", text)
    else:
        text = from_plain(text, suffix)
    text = GAPS.sub("\n\n", BLANK.sub("\n", text)).strip()
    return text if is_readable(text, kind) else None


def pieces(text):
    """A text in documents of a bounded length, cut between paragraphs."""
    while len(text) > LONGEST:
        cut = text.rfind("\n\n", 1, LONGEST)
        cut = cut if cut > 0 else LONGEST
        yield text[:cut]
        text = text[cut:].lstrip("\n")
    yield text


def files(archive, take):
    """Paths and contents in a tar file that is read once, and in the archives in it."""
    for member in archive:
        if not member.isfile():
            continue
        path = member.name.removeprefix("./")
        if path.endswith(ARCHIVES) and path.startswith("usr/src"):
            with tarfile.open(fileobj=archive.extractfile(member), mode="r|*") as inner:
                yield from files(inner, take)
        elif path.endswith("/src.zip"):
            with zipfile.ZipFile(io.BytesIO(archive.extractfile(member).read())) as inner:
                for name in inner.namelist():
                    if take(name) and not name.endswith("/"):
                        yield name, inner.read(name)
        elif member.size <= LONGEST_FILE and take(path):
            yield path, archive.extractfile(member).read()


COPYRIGHT = re.compile(r"usr/share/doc/[^/]+/copyright")


def documents(package, kind, share, only):
    """The documents of a package file, pairs of a path and a text, and the text of its copyright file.

    That text is None if the file is a link to the one of another package.
    """
    pattern = re.compile(only) if only else None
    found, rights = [], None

    def take(path):
        return COPYRIGHT.fullmatch(path) or (chosen(path, share) and (pattern is None or pattern.search(path)))

    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for path, data in files(archive, take):
                if COPYRIGHT.fullmatch(path):
                    rights = data.decode("utf-8", "replace")
                    continue
                text = document(path, data, kind)
                if text:
                    found.extend((path, piece) for piece in pieces(text))
        process.stdout.read()
    return found, rights


# A field of Debian's format that holds a sentence of a licence, and not its name.
SENTENCE = re.compile(r"\*|Permission |By |This |The |Copyright |All |You |Redistribution |Licensed ")

KNOWN_LICENCES = {
    "GPL": r"General Public License|\bGPL\b",
    "LGPL": r"Lesser General Public|\bLGPL\b",
    "GFDL": r"Free Documentation License|\bFDL\b",
    "Apache-2.0": r"Apache License",
    "BSD": r"\bBSD\b|Redistribution and use in source and binary forms",
    "MPL": r"Mozilla Public License",
    "Expat": r"Permission is hereby granted, free of charge",
    "PSF": r"Python Software Foundation|PSF License",
    "Artistic": r"Artistic Licen[cs]e",
    "public-domain": r"public domain",
    "CC": r"Creative Commons",
    "PostgreSQL": r"Postgres",
    "permissive": r"Permission to use, copy, modify",
}


def licences(text):
    """Names of licences in a copyright file: its fields where it is in Debian's format, else those that it mentions."""
    if text is None:
        return []
    fields = [re.sub(r"\s+", " ", name.strip()) for name in re.findall(r"^License:[ \t]*(\S[^\n]*)$", text, re.MULTILINE)]
    names = [name for name in fields if len(name) <= 70 and not SENTENCE.match(name)]
    if not names:
        names = [name for name, pattern in KNOWN_LICENCES.items() if re.search(pattern, text, re.IGNORECASE)]
    return sorted(set(names))[:12] or ["as in its copyright file"]
