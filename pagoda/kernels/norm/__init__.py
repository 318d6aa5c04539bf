"""RMS and layer normalisation, alone and fused with the residual sum."""
