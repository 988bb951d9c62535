"""A whole HTML file that needs no network and runs nothing but its own script."""

import base64
import hashlib
from html import escape


def document(title: str, style: str, body: str, script: str = "") -> str:
    """Return the file. Its policy lets its own style and script in and nothing else, whatever a record smuggles in.

    Args:
        title: of the window; escaped here.
        style: the style sheet.
        body: what the page shows, as HTML.
        script: the page's own, which stands in the body; empty: none may run.
    """
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'"
    policy += f"; script-src '{_hash(script)}'" if script else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
