"""Tangents of attention and of its backward pass over tiles, in NumPy, written to be read.

Everything that a call reads may have a tangent, written `dot`: how it changes along one direction.
With x the scaled product, s the final score, t a table entry that s reads, `s_x` and `s_t` the
derivatives of s, and f the dropout factors, for one block of queries against one block of keys

    xdot[i,j] = scale * (qdot[i] . k[j] + q[i] . kdot[j])
    sdot[i,j] = s_x * xdot + sum_t s_t * tdot
    r[i]      = sum_j w[i,j] sdot[i,j]                               the tangent of lse
    wdot[i,j] = w[i,j] * (sdot[i,j] - r[i])
    odot[i]   = sum_j f[i,j] * (wdot[i,j] v[j] + w[i,j] vdot[j])     the tangent of the output

Each line of the backward pass has its tangent too, for cotangents dO and d lse that stay:

    dP    = f * (dO[i] . v[j])           dPdot    = f * (dO[i] . vdot[j])
    delta = sum_j w dP - d lse           deltadot = sum_j (wdot dP + w dPdot)
    dS    = w * (dP - delta)             dSdot    = wdot * (dP - delta) + w * (dPdot - deltadot)
    dX    = dS * s_x                     dXdot    = dSdot * s_x + dS * s_xdot
    dQ    = scale * sum_j dX k[j]        dQdot    = scale * sum_j (dXdot k[j] + dX kdot[j])
    dK    = scale * sum_i dX q[i]        dKdot    = scale * sum_i (dXdot q[i] + dX qdot[i])
    dV    = sum_i f w dO[i]              dVdot    = sum_i f wdot dO[i]
    dt    = sum_ij dS * s_t              dtdot    = sum_ij (dSdot * s_t + dS * s_tdot)

The right column is a product with the Hessian of `<dO, out> + <d lse, lse>`. A Hessian is
symmetric, so it is also the gradient of `<dO, odot> + <d lse, r>`: the vector-Jacobian product of
the backward pass. A sink is a key of value 0 whose score is the sink. Queries and keys are rotated
before, as are their tangents, and their gradients are rotated back.

Sums over a row are taken of how sdot, dP and dPdot differ from those of the key with its largest
score. Where that key has nearly all the weight, large terms would cancel otherwise.

Tiles are computed twice: first for the sums over rows, `sum_j w`, r, delta and deltadot, then for
the rest. Weights are taken from the largest score of a row as it is computed here, and divided by
their sum: another order of addition moves scores near 1e10 in float32 by a thousand, so that
`exp(s - lse)` with the lse of a backend would be infinite or 0. Forbidden pairs are selected
out, never multiplied by 0.

tangents    blocks of queries of some heads, their tiles, and the tangents of both
passes      the tangents of output and lse, and those of all gradients
"""
