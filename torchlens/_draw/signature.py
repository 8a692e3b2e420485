"""The receipt inside the file of a picture, where its readers show or skip it."""

from zlib import crc32

_PNG_HEADER = 33  # bytes of the signature and of the chunk IHDR, which must be the first


def signed(picture: bytes, fileformat: str, receipt: str) -> bytes:
    """The file with the receipt: a comment in SVG and PDF, text in PNG; other formats unchanged."""
    if not receipt:
        return picture
    if fileformat == "svg":
        note = receipt.replace("--", "- -").encode("utf-8", "backslashreplace")
        return _before(b"</svg>", b"<!-- " + note + b" -->\n", picture)
    if fileformat == "pdf":
        # A comment there moves nothing that the table of offsets names.
        note = receipt.encode("ascii", "backslashreplace")
        return _before(b"startxref", b"% " + note + b"\n", picture)
    if fileformat == "png":
        chunk = b"tEXtDescription\0" + receipt.encode("latin-1", "backslashreplace")
        whole = (len(chunk) - 4).to_bytes(4, "big") + chunk + crc32(chunk).to_bytes(4, "big")
        return picture[:_PNG_HEADER] + whole + picture[_PNG_HEADER:]
    return picture


def _before(end: bytes, note: bytes, picture: bytes) -> bytes:
    text, found, rest = picture.rpartition(end)
    return text + note + found + rest
