/*
 * A gather function for processes that one process has forked, through memory that they share. With MPI it would be one call of
 * MPI_Allgather.
 */
#ifndef BOARD_H
#define BOARD_H

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ringseal.h"

enum { MOST_RANKS = 16, ROUNDS = 32 };

/* What every rank has said in every round. Each round is used once. */
struct board {
    int ranks;
    int present[ROUNDS][MOST_RANKS];
    uint8_t said[ROUNDS][MOST_RANKS][RINGSEAL_GATHER_BYTES];
};

struct seat {
    struct board *board;
    int rank, round;
};

static int32_t gather(void *user, const uint8_t *message, size_t bytes, uint8_t *gathered, uint64_t timeout_ms) {
    struct seat *seat = user;
    struct board *board = seat->board;
    int round = seat->round++;
    if (round == ROUNDS || bytes != RINGSEAL_GATHER_BYTES) return 1;
    memcpy(board->said[round][seat->rank], message, bytes);
    __atomic_store_n(&board->present[round][seat->rank], 1, __ATOMIC_RELEASE);
    for (int rank = 0; rank < board->ranks; rank++) {
        for (uint64_t waited = 0; !__atomic_load_n(&board->present[round][rank], __ATOMIC_ACQUIRE); waited++) {
            if (waited == timeout_ms) return 2;
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        memcpy(gathered + rank * bytes, board->said[round][rank], bytes);
    }
    return 0;
}

/* Forks a process for each rank, each of which returns what `run` does; 0 when all have returned 0. */
static int fork_ranks(int ranks, int (*run)(struct seat *seat, const uint8_t *secret)) {
    struct board *board =
        mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED || ranks > MOST_RANKS) return 1;
    board->ranks = ranks;
    /* Between machines it comes from attestation. */
    uint8_t secret[RINGSEAL_SECRET_BYTES];
    if (getentropy(secret, sizeof secret) != 0) return 1;
    for (int rank = 0; rank < ranks; rank++) {
        pid_t child = fork();
        if (child < 0) return 1;
        if (child == 0) {
            int outcome = run(&(struct seat){.board = board, .rank = rank}, secret);
            fflush(stdout);
            _exit(outcome);
        }
    }
    int failed = 0, status;
    while (wait(&status) > 0) failed |= status;
    return failed != 0;
}

#endif
