"""The columns of stage `quality`: name, Arrow type, meaning with its source.

Invariant: the beginning of a name says whose rule it measures. Gopher: Rae et al. 2021, arXiv 2112.11446. C4: Raffel
et al. 2020, JMLR 21, and its code in TensorFlow Datasets. FineWeb: Penedo et al. 2024, arXiv 2406.17557. A share of
nothing is 0.
"""

from __future__ import annotations

QUALITY = (
    ("gopher_words", "int32", "words (`str.split`) with a character that is no punctuation (Gopher, A.1.1)"),
    ("gopher_word_length", "float", "mean length of gopher_words, in code points; 0 without words (Gopher, A.1.1)"),
    ("gopher_hash_ratio", "float", "`#` per word (Gopher, A.1.1)"),
    ("gopher_ellipsis_ratio", "float", "`...` and `…` per word (Gopher, A.1.1)"),
    ("gopher_bullet_lines", "float", "share of lines that begin with `•` or `-` (Gopher, A.1.1)"),
    ("gopher_ellipsis_lines", "float", "share of lines that end with `...` or `…` (Gopher, A.1.1)"),
    ("gopher_alpha_words", "float", "share of words with a letter (Gopher, A.1.1)"),
    ("gopher_stop_words", "int32", "distinct stop words that occur, as they are written (Gopher, A.1.1)"),
    ("gopher_dup_lines", "float", "share of lines that repeat an earlier one (Gopher, table A1)"),
    ("gopher_dup_line_chars", "float", "share of the text's characters in gopher_dup_lines (Gopher, table A1)"),
    ("gopher_dup_paragraphs", "float", "share of paragraphs that repeat an earlier one (Gopher, table A1)"),
    (
        "gopher_dup_paragraph_chars",
        "float",
        "share of the text's characters in gopher_dup_paragraphs (Gopher, table A1)",
    ),
    *(
        (
            f"gopher_top_{n}gram",
            "float",
            f"share of the text's characters in its most frequent {n}-gram (Gopher, table A1)",
        )
        for n in (2, 3, 4)
    ),
    *(
        (f"gopher_dup_{n}gram", "float", f"share of the text's characters in repeated {n}-grams (Gopher, table A1)")
        for n in range(5, 11)
    ),
    ("c4_lines", "int32", "lines of the text (`str.splitlines`); the sum of the next eight columns"),
    ("c4_long_word_lines", "int32", "lines with a word of over 1,000 characters (C4's code)"),
    ("c4_unended_lines", "int32", "further lines that do not end in terminal punctuation (C4, section 2.2)"),
    ("c4_short_lines", "int32", "further lines of under 3 words (C4, section 2.2)"),
    ("c4_lorem_ipsum_lines", "int32", "further lines with `lorem ipsum` (C4, section 2.2)"),
    ("c4_javascript_lines", "int32", "further lines with `javascript` (C4, section 2.2)"),
    ("c4_curly_lines", "int32", "further lines with a curly bracket (C4, section 2.2)"),
    ("c4_policy_lines", "int32", "further lines about cookies, privacy or terms of use (C4's code)"),
    ("c4_kept_lines", "int32", "lines that meet no rule of C4"),
    ("c4_sentences", "int32", "sentences in c4_kept_lines (C4, section 2.2)"),
    ("fineweb_lorem_ipsum_lines", "int32", "as c4_lorem_ipsum_lines, among lines of any ending (FineWeb, 3.5)"),
    ("fineweb_curly_lines", "int32", "as c4_curly_lines, among lines of any ending (FineWeb, 3.5)"),
    ("fineweb_sentences", "int32", "as c4_sentences, in lines of any ending (FineWeb, 3.5)"),
    ("fineweb_ended_lines", "float", "share of non-blank lines that end in terminal punctuation (FineWeb, 3.5)"),
    ("fineweb_short_lines", "float", "share of non-blank lines of up to 30 characters (FineWeb, 3.5)"),
    ("fineweb_dup_line_chars", "float", "share of characters in lines that repeat an earlier one (FineWeb, 3.5)"),
    ("fineweb_newlines", "float", "line feeds per word (datatrove's FineWebQualityFilter)"),
    ("language", "string", "language of the text's beginning, ISO 639-1; `und` where there is none to tell"),
    ("language_probability", "float", "probability of the language, from 0 to 1"),
    ("pii_emails", "int32", "e-mail addresses (datatrove's PIIFormatter)"),
    ("pii_ips", "int32", "public IP addresses, version 4 (datatrove's PIIFormatter)"),
)
"""In table order."""
