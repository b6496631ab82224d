"""Where the text comes from: corpora (`sources`), their harvest (`environment`, `cldr`) and `tokens`."""
