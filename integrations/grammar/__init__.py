"""Structured output: a grammar decides which tokens a sequence may continue with, by llguidance.

grammars          what a text must fit: a JSON schema, a regex, a list of texts, a grammar
constraints       in which part of an answer a grammar holds
equivalent_schemas  JSON schemas in keywords that llguidance knows
grammar_texts     grammars as llguidance takes them, and its limits
vocabulary        compiles grammars for a tokenizer; needs the extra `structured`
compiled_grammar  a grammar that sequences can begin
trigger           finds the text after which a grammar begins
followed_grammar  follows one sequence through its grammar
token_masks       which tokens the grammars of many sequences allow
processor         a logits processor of mlx-lm
masked_steps      masks the logits of all sequences of a batch in one operation
call_forms        in which forms models call tools
call_rules        writes rules of a grammar for calls
text_patterns     what schemas say of texts, as regular expressions
value_readings    how parsers read values whose texts have no quotes
call_constraints  what an answer must fit that may, or must, call tools
grammar_check     compiles a grammar in a process with a limit of time and memory
"""
