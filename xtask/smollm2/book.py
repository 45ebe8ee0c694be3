"""Writes the text of The Rust Programming Language, as rustup installs it in HTML.

book.py FOLDER_OF_HTML TEXT_TO_EVALUATE TEXT_TO_CALIBRATE_ON TEXT_TO_TRAIN_ON
"""
import os
import re
import sys
from html.parser import HTMLParser

BLOCKS = ("p", "h1", "h2", "h3", "h4", "li")


class Text(HTMLParser):
    """The text in <main>, a line for each block, code as it is."""

    def __init__(self):
        super().__init__()
        self.is_main, self.hidden, self.code, self.parts = False, 0, 0, []

    def handle_starttag(self, tag, attributes):
        self.is_main |= tag == "main"
        self.hidden += tag in ("script", "style", "nav")
        self.code += tag == "pre"
        if tag in BLOCKS or tag == "pre":
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.is_main &= tag != "main"
        self.hidden -= tag in ("script", "style", "nav")
        self.code -= tag == "pre"
        if tag in BLOCKS or tag == "pre":
            self.parts.append("\n")

    def handle_data(self, data):
        if self.is_main and not self.hidden:
            self.parts.append(data if self.code else re.sub(r"\s+", " ", data))


folder, evaluate, calibrate, train = sys.argv[1:]
chapters = sorted(name for name in os.listdir(folder) if re.match(r"ch\d\d-\d\d.*\.html$", name))
texts = []
for chapter in chapters:
    text = Text()
    with open(os.path.join(folder, chapter), encoding="utf-8") as file:
        text.feed(file.read())
    texts.append(re.sub(r"\n{3,}", "\n\n", "".join(text.parts)).strip())
book = "\n\n".join(texts)
# Ten windows of 512 tokens, and eight sequences of 512 from another half of the book.
for path, first, count in [(evaluate, 0, 24_000), (calibrate, 600_000, 40_000)]:
    if len(book) < first + count:
        sys.exit(f"{folder} has {len(book)} characters, but {first + count} are needed")
    with open(path, "w", encoding="utf-8") as file:
        file.write(book[first : first + count])
# All that is not evaluated.
with open(train, "w", encoding="utf-8") as file:
    file.write(book[24_000:])
