"""Pass 6: what is wrong with a draft, all at once."""


def lint(draft):
    out = [f"{n}: {'; '.join(w)}" for n, w in draft.roles.unknown.items()]
    for n, m in draft.members.items():
        out += [f"{n}: {p.message}" for p in m.placed.problems]
    return out
