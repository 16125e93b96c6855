"""Run a command in which @NAME stands for the words of the variable NAME.

The words are split at spaces and line breaks, with the quotes of a shell. No shell reads them, so
nothing in them is run, replaced or cut off: `#`, `>` and `$` mean themselves.
"""

import os
import shlex
import sys

words = sys.argv[:0]  # Python 3.6 must be able to run this
for word in sys.argv[1:]:
    try:
        text = os.environ.get(word[1:], "").replace("\\\n", " ")
        words += shlex.split(text) if word.startswith("@") else [word]
    except ValueError as error:
        sys.exit(f"error: {word[1:]} is {text!r}: {str(error).lower()}, so add it")
os.execvp(words[0], words)
