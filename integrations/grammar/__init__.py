"""Structured output: a grammar decides which tokens a sequence may continue with, by llguidance.

grammars          what a text must fit: a JSON schema, a regex, a list of texts, a grammar
constraints       what an answer must fit: a grammar in some part of it, or calls of tools
equivalent_schemas  JSON schemas in keywords that llguidance knows
grammar_check     grammars as llguidance takes them, checked in a process with limits
vocabulary        compiles grammars for a tokenizer, and begins them
followed_grammar  follows one sequence through its grammar, from the text after which it begins
processor         masks logits: of one sequence as mlx-lm's logits processor, or of many
masked_steps      masks the logits of all sequences of a batch in one operation
call_forms        in which forms models call tools
call_rules        writes rules of a grammar for calls
text_patterns     what schemas say of texts, as regular expressions
value_syntax      how parsers read values whose texts have no quotes
"""
