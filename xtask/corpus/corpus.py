"""Makes the training text of the ladder and its shards of tokens from packages of Debian.

corpus.py LIST_OF_PACKAGES OUT [--processes N]

OUT has at the end: tokenizer/, train-N.tokens and their .xz, valid.tokens(.xz) and manifest.json. Packages that are in
OUT/packages are not downloaded again, and those that have been read (OUT/texts) are not read again.
"""
import argparse
import array
import collections
import hashlib
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import time

import regex
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import extract

# The release of Debian whose packages are read.
RELEASE = "bookworm"
VOCABULARY = 32_000
END = "<|endoftext|>"
# Text of a package at most, in bytes, so that none prevails.
MOST_OF_PACKAGE = 16_000_000
# The same, of a package of validation.
MOST_OF_VALIDATION = 1_200_000
# Every how many documents the tokenizer is trained on.
EVERY = 24
# Blocks with fewer letters and digits are too short to tell copies by.
LEAST_BLOCK = 32
# How often a short block may come in a package before it counts as part of a template.
MOST_REPEATS = 20
# Text that is left of a document at least, in bytes.
LEAST_DOCUMENT = 200
# Tokens of all shards, about: what a run of 30 M parameters sees three and a half times.
TOKENS = 216_000_000
# Tokens of a shard at most.
SHARD = 58_000_000
# Rows of a run: shards have whole ones, so that none is padded.
CONTEXT = 512


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Package:
    """A line of the list: part, kind and name, and options.

    The options are `share=S` (of its files), `only=REGEX` (of their paths) and `rights=PACKAGE` (the one that has its
    copyright file).
    """

    def __init__(self, line):
        self.part, self.kind, self.name, *options = line.split()
        assert self.part in ("train", "valid") and self.kind in ("prose", "code"), line
        given = dict(option.split("=", 1) for option in options)
        self.share = float(given.pop("share", 1.0))
        self.only = given.pop("only", None)
        self.rights = given.pop("rights", None)
        assert not given, f"unknown options {given} in {line!r}"


def read_list(path):
    with open(path, encoding="utf-8") as file:
        lines = [line.split("#")[0].strip() for line in file]
    packages = [Package(line) for line in lines if line]
    names = collections.Counter(package.name for package in packages)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        sys.exit(f"{path}: {twice} come twice, but a package is in one part")
    return packages


def download(packages, folder):
    """The files of packages, by name: those in `folder`, and the rest by apt.

    Versions are those of the release itself, which no longer change; security updates would make another corpus.
    """
    os.makedirs(folder, exist_ok=True)

    def present():
        return {name.split("_")[0]: os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".deb")}

    names = [name for package in packages for name in (package.name, package.rights) if name]
    missing = [name for name in names if name not in present()]
    for first in range(0, len(missing), 50):
        say(f"downloading {len(missing) - first} packages")
        command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *(f"{name}/{RELEASE}" for name in missing[first : first + 50])]
        subprocess.run(command, cwd=folder, check=True)
    found = present()
    return {name: found[name] for name in names}


def read_package(job):
    """Writes the documents of a package, a line of JSON each, with what identifies the package in the first line."""
    package, path, out = job
    if os.path.exists(out):
        return package.name
    control = subprocess.run(["dpkg-deb", "--field", path, "Version", "Source"], stdout=subprocess.PIPE, text=True, check=True).stdout
    fields = dict(line.split(": ", 1) for line in control.splitlines())
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    head = {"package": package.name, "version": fields["Version"], "source": fields.get("Source", package.name).split(" ")[0], "sha256": sha256}
    documents, rights = extract.documents(path, package.kind, package.share, package.only)
    head["licences"] = extract.licences(rights)
    with open(out + ".unfinished", "w", encoding="utf-8", errors="replace") as file:
        for line in [head, *documents]:
            file.write(json.dumps(line) + "\n")
    os.replace(out + ".unfinished", out)
    return package.name


KEPT = bytes(range(0x30, 0x3A)) + bytes(range(0x61, 0x7B)) + bytes(range(0x80, 0x100))
DELETED = bytes(byte for byte in range(256) if byte not in KEPT)
FOLDED = bytes(0x30 if 0x30 <= byte <= 0x39 else byte for byte in range(256))


def normalised(block):
    """Letters in lower case, digits as zeros, and nothing else: blocks that differ in more are no copies."""
    return block.lower().encode("utf-8", "replace").translate(FOLDED, DELETED)


def blocks_of(text):
    """For each paragraph of a text: 64 bits of what is compared, or the letters themselves if they are few, and their number."""
    for block in text.split("\n\n"):
        normal = normalised(block)
        if len(normal) < LEAST_BLOCK:
            yield normal, len(normal)
        else:
            yield int.from_bytes(hashlib.blake2b(normal, digest_size=8).digest(), "little"), len(normal)


def with_blocks(path):
    """The first line of a package's texts, and its documents as `(path, text, blocks)`."""
    with open(path, encoding="utf-8") as file:
        record, found = json.loads(file.readline()), []
        # Much more than is kept of a package is not compared with others.
        share = 1.2 * MOST_OF_PACKAGE / os.path.getsize(path)
        for line in file:
            path, text = json.loads(line)
            if extract.chosen(path, share):
                found.append((path, text, list(blocks_of(text))))
    return record, found


class Seen:
    """Drops blocks of text that have come before: exact copies, and those that differ in case, spaces or numbers."""

    def __init__(self):
        self.hashes = set()

    def is_new(self, number):
        before = len(self.hashes)
        self.hashes.add(number)
        return len(self.hashes) > before

    def prose(self, text, blocks, repeats):
        """The text without copied paragraphs and without short ones of a template."""
        kept = []
        for block, (known, _) in zip(text.split("\n\n"), blocks):
            if isinstance(known, bytes):
                repeats[known] += 1
                if repeats[known] > MOST_REPEATS:
                    continue
            elif not self.is_new(known):
                continue
            kept.append(block)
        return "\n\n".join(kept)

    def code(self, text, blocks):
        """The text, or nothing if more than half of it has come before."""
        copied, whole = 0, 0
        for known, size in blocks:
            if not isinstance(known, bytes):
                whole += size
                if not self.is_new(known):
                    copied += size
        return "" if 2 * copied > whole else text


def deduplicated(packages, folder, pool):
    """Documents as `(package index, hash of its path, bytes)`, and what is known of each package.

    Packages of validation come first: what they share with others is theirs.
    """
    seen, documents, records = Seen(), [], [None] * len(packages)
    order = sorted(range(len(packages)), key=lambda index: packages[index].part != "valid")
    texts = [os.path.join(folder, packages[index].name + ".jsonl") for index in order]
    for index, (record, found) in zip(order, pool.imap(with_blocks, texts)):
        package, repeats, own, read = packages[index], collections.Counter(), [], 0
        for path, text, blocks in found:
            read += len(text)
            text = seen.prose(text, blocks, repeats) if package.kind == "prose" else seen.code(text, blocks)
            data = text.strip().encode("utf-8", "replace")
            if len(data) >= LEAST_DOCUMENT:
                number = extract.digest(f"{package.name}/{path}/{len(own)}")
                own.append((index, number, data))
        record.update(part=package.part, kind=package.kind, read_bytes=read, unique_bytes=sum(len(data) for *_, data in own))
        records[index] = record
        documents += limited(own, MOST_OF_VALIDATION if package.part == "valid" else MOST_OF_PACKAGE)
    return documents, records


def limited(documents, most):
    """The documents of lowest hash, up to `most` bytes."""
    total = sum(len(data) for *_, data in documents)
    if total <= most:
        return documents
    kept = []
    for document in sorted(documents, key=lambda document: document[1]):
        if most <= 0:
            break
        kept.append(document)
        most -= len(document[2])
    return kept


def balanced(documents, packages):
    """Documents of a part, as much code as prose: the kind of which there is more is cut."""
    kinds = {kind: [document for document in documents if packages[document[0]].kind == kind] for kind in ("prose", "code")}
    sizes = {kind: sum(len(data) for *_, data in found) for kind, found in kinds.items()}
    say("unique text: " + ", ".join(f"{size / 1e6:.1f} MB of {kind}" for kind, size in sizes.items()))
    least = min(sizes.values())
    return limited(kinds["prose"], least) + limited(kinds["code"], least)


def train_tokenizer(documents, folder):
    """Byte-level BPE, with the settings of `nvfp4 pretrain --train-tokenizer`."""
    path = os.path.join(folder, "tokenizer.json")
    os.makedirs(folder, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(END, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    sample = [data.decode("utf-8") for *_, data in documents[::EVERY]]
    say(f"training the tokenizer on {sum(map(len, sample)) / 1e6:.1f} M characters")
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(path)
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}, file, indent=2)
    return path


def fnv(*parts):
    """FNV-1a of 64 bits."""
    number = 0xCBF29CE484222325
    for part in parts:
        for byte in part:
            number = ((number ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return number


def write_shard(path, ids, tokenizer_hash):
    """One document of 2-byte tokens in the format of `lm/src/tokens/shard.rs`. Returns its check sum."""
    if sys.byteorder != "little":
        ids.byteswap()
    tokens = ids.tobytes()
    tokens += bytes(-len(tokens) % 8)
    ends = struct.pack("<Q", len(ids))
    checksum = fnv(tokens, ends)
    header = b"NVFP4TOK" + struct.pack("<II6Q", 1, 2, len(ids), 1, VOCABULARY, tokenizer_hash, 0, checksum)
    assert len(header) == 64
    with open(path + ".unfinished", "wb") as file:
        file.write(header + tokens + ends)
    os.replace(path + ".unfinished", path)
    return f"{checksum:016x}"


# The words that byte-level BPE encodes one by one (GPT-2's expression, which `ByteLevel` of `tokenizers` uses).
WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class Words(dict):
    """The tokens of each word, as bytes of 2-byte numbers: text repeats its words, and BPE of a word takes long."""

    def __init__(self, path):
        self.tokenizer = Tokenizer.from_file(path)

    def __missing__(self, word):
        tokens = array.array("H", self.tokenizer.encode(word, add_special_tokens=False).ids).tobytes()
        # Names and numbers that come once would fill the memory.
        if len(self) < 4_000_000:
            self[word] = tokens
        return tokens


WORDS_OF = {}


def encode(job):
    """The tokens of texts in a tokenizer's file, each text with the token that ends it, and the number of each."""
    path, texts = job
    if path not in WORDS_OF:
        WORDS_OF[path] = Words(path)
    words = WORDS_OF[path]
    end = array.array("H", [words.tokenizer.token_to_id(END)]).tobytes()
    found = [b"".join(map(words.__getitem__, WORDS.findall(text.decode("utf-8")))) + end for text in texts]
    return b"".join(found), [len(tokens) // 2 for tokens in found]


def batches(documents):
    """Documents in order, some megabytes at a time."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[2])
        if size > 4_000_000:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encoded(path, documents, records, pool):
    """The tokens of documents, one after the other, by the tokenizer in file `path`."""
    ids, parts = array.array("H"), list(batches(documents))
    jobs = ((path, [data for *_, data in batch]) for batch in parts)
    for batch, (tokens, counts) in zip(parts, pool.imap(encode, jobs)):
        ids.frombytes(tokens)
        for (index, _, _), count in zip(batch, counts):
            records[index]["tokens"] = records[index].get("tokens", 0) + count
    return ids


def finish_shard(job):
    path, ids, tokenizer_hash = job
    checksum = write_shard(path, ids, tokenizer_hash)
    subprocess.run(["xz", "-6", "--keep", "--force", "--threads=1", path], check=True)
    sizes = [os.path.getsize(name) for name in (path, path + ".xz")]
    with open(path + ".xz", "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": os.path.basename(path), "tokens": len(ids), "bytes": sizes[0], "xz_bytes": sizes[1], "xz_sha256": sha256, "checksum": checksum}


def name_licences(records, rights):
    """Adds missing licences: those of the package file in `rights`, or of the same source if its copyright file is a link."""
    for record in records:
        if record["licences"]:
            continue
        _, text = extract.documents(rights[record["package"]], "prose", 0.0, None)
        same = [other["licences"] for other in records if other["source"] == record["source"] and other["licences"]]
        record["licences"] = extract.licences(text) or (same[0] if same else [])
        if not record["licences"]:
            sys.exit(f"the licences of {record['package']} are not known: name the package with its copyright file by rights=")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("list")
    parser.add_argument("out")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    packages, out = read_list(arguments.list), arguments.out
    texts = os.path.join(out, "texts")
    os.makedirs(texts, exist_ok=True)
    files = download(packages, os.path.join(out, "packages"))
    jobs = [(package, files[package.name], os.path.join(texts, package.name + ".jsonl")) for package in packages]
    jobs.sort(key=lambda job: -os.path.getsize(job[1]))
    with multiprocessing.Pool(arguments.processes) as pool:
        for done, name in enumerate(pool.imap_unordered(read_package, jobs), 1):
            if done % 20 == 0 or done == len(jobs):
                say(f"{done} of {len(jobs)} packages are read")
        documents, records = deduplicated(packages, texts, pool)
        name_licences(
            [record for record in records if record["unique_bytes"]],
            {package.name: files[package.rights or package.name] for package in packages},
        )
        parts = {}
        for name in ("valid", "train"):
            own = [document for document in documents if packages[document[0]].part == name]
            parts[name] = sorted(balanced(own, packages), key=lambda document: document[1])
        del documents, own
        path = train_tokenizer(parts["train"], os.path.join(out, "tokenizer"))
        with open(path, "rb") as file:
            tokenizer_hash = fnv(file.read())
        say("encoding")
        results = []

        def write(name, ids):
            del ids[(len(ids) - 1) // CONTEXT * CONTEXT + 1 :]
            say(f"{name}: {len(ids) / 1e6:.2f} M tokens")
            results.append(pool.apply_async(finish_shard, [(os.path.join(out, name), ids, tokenizer_hash)]))

        write("valid.tokens", encoded(path, parts["valid"], records, pool))
        # The first documents say how many bytes a token has.
        first = parts["train"][:2000]
        bytes_of_token = sum(len(data) for *_, data in first) / len(encoded(path, first, [dict() for _ in packages], pool))
        parts["train"] = limited(parts["train"], TOKENS * bytes_of_token)
        sizes = [len(data) for *_, data in parts["train"]]
        total = sum(sizes) / bytes_of_token
        count = max(1, -int(-total * 1.02 // SHARD))
        begin = 0
        for shard in range(count):
            goal, end, size = sum(sizes[begin:]) / (count - shard), begin, 0
            while end < len(sizes) and (size < goal or shard == count - 1):
                size += sizes[end]
                end += 1
            write(f"train-{shard + 1}.tokens", encoded(path, parts["train"][begin:end], records, pool))
            begin = end
        shards = [result.get() for result in results]
    used = [record for record in records if record.get("tokens")]
    kinds = {f"{part}_{kind}_tokens": sum(record["tokens"] for record in used if (record["part"], record["kind"]) == (part, kind))
             for part in ("train", "valid") for kind in ("prose", "code")}
    shared = {record["source"] for record in used if record["part"] == "valid"} & {record["source"] for record in used if record["part"] == "train"}
    if shared:
        sys.exit(f"source packages {sorted(shared)} are in training and validation")
    manifest = {"vocabulary": VOCABULARY, "tokenizer": f"{tokenizer_hash:016x}", **kinds, "shards": shards, "packages": used}
    with open(os.path.join(out, "manifest.json"), "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.write("\n")
    say(f"{sum(shard['tokens'] for shard in shards[1:]) / 1e6:.1f} M tokens to train in {count} shards; " + ", ".join(f"{name} {number / 1e6:.2f} M" for name, number in kinds.items()))


if __name__ == "__main__":
    main()
