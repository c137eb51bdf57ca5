"""Owns the texts whose answers are recorded with every store; knows neither tokenizer nor model.

They are plain sentences, code, digits and another script: short, so that the start-up gate costs a
fraction of a second, and unlike each other, so that a fault in one part of a vocabulary is seen.
"""

KNOWN_TEXTS = {
    "prose": (
        "The harbour was quiet in the early morning. A ship had come in during the night, and the "
        "first thing people asked was where it had been. Nobody on the quay knew, but the captain "
        "said that the capital of France is Paris, and that he had sailed from the north."
    ),
    "code": (
        "def mean(values):\n"
        '    """Returns the average of a list of numbers."""\n'
        "    total = 0\n"
        "    for value in values:\n"
        "        total += value\n"
        "    return total / len(values)\n"
    ),
    "digits": (
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12. 7 + 5 = 12. In 1969 and in 2026, 64 x 8 = 512."
    ),
    "mixed": (
        "Bonjour, comment allez-vous ? Guten Morgen! "
        "\u65e9\u4e0a\u597d\u3002 \u0414\u043e\u0431\u0440\u043e\u0435 \u0443\u0442\u0440\u043e. "
        '{"name": "first light", "ready": true}'
    ),
}
# Tokens taken of each text.
KNOWN_TOKENS = 32
