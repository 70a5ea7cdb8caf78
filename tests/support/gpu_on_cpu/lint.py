"""Finds in clang's syntax tree what Metal refuses and C++ for OpenCL accepts."""

import re

# Matches only nodes with a name: the compiler adds others by itself.
DECLARATION = re.compile(
    r"\b(?:ParmVarDecl|VarDecl|FieldDecl)\b[^']* (?!used |referenced )[A-Za-z_]\w* '"
)


# Lines without one of these are no fault; there are thousands.
SUSPICIOUS = re.compile(r"__generic|__bf16| static|__global |LambdaExpr|double")
PLACE = re.compile(r"<([^>]*:[^>]*)>")
FILE_AND_LINE = re.compile(r"([\w./-]+):(\d+):\d+")


def faults_of_metal(tree: str) -> set[str]:
    """Faults that Metal's compiler would report, found in a dump of the syntax tree."""
    faults: set[str] = set()
    in_kernel, line_number = False, "?"
    for line in tree.splitlines():
        if place := PLACE.search(line):
            for file, at in FILE_AND_LINE.findall(place[1]):
                line_number = at
                if file != "line":
                    in_kernel = file == "kernel"
        if in_kernel and SUSPICIOUS.search(line) and (fault := _fault(line)):
            faults.add(f"kernel:{line_number}: {fault}")
    return faults


def _fault(line: str) -> str:
    types = re.findall(r"'([^']*)'", line)
    if DECLARATION.search(line) and types and "__generic" in types[0]:
        return f"'{types[0]}' has no address space"
    is_implicit = "ImplicitCastExpr" in line and "part_of_explicit_cast" not in line
    converts = re.search(r"<(FloatingCast|IntegralToFloating)>", line)
    if is_implicit and converts and "__bf16" in "".join(types):
        return "an implicit conversion to or from bfloat"
    if re.search(r"\bVarDecl\b.* static\b", line) and "__constant" not in line:
        return "a static variable"
    if "VarDecl" in line and types and re.search(r"__global [^*&]*$", types[0]):
        return "a variable of the program that is not constant"
    if "LambdaExpr" in line:
        return "a lambda expression"
    if types and re.search(r"\bdouble\b", types[0]) and "Decl" in line:
        return "a double"
    return ""
