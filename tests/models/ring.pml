/* The hint ring (shmring/ring.py) with its sleep and wake-up, under a weak memory model.
 *
 * Memory model.  Stores go through a store buffer and reach memory in any order; a release store waits for the stores before
 * it; a fence waits until the buffer is empty.  A plain load may return the line's value at the reader's last acquire or the
 * present one.  A load that no acquire or release orders may also happen after a later store (release away) or before an
 * earlier load (acquire away): written out as a choice of order where a mutation takes the order away.
 *
 * A line holds (position + 1) * 4 + kind, so that a line of another lap, or of before, never looks right.
 *
 * With -DTHREADS=2 two threads of one process push.  What they know of the ring is one object, and each push is one turn of
 * the lock that orders Python's threads (the GIL): the next thread has it only when the one before has stored everything.
 *
 * Checked: every record is taken once, whole, in order; nobody waits for a bell that nobody rings (an invalid end state); with
 * -DCRASH the producer dies at any point and the consumer takes all published records, whole, and ends.
 * Mutations, each of which must make the check fail: the names M_* below (tests/models/test_models.py).
 */
#define CAP 4
#ifndef RECORDS
#define RECORDS 5
#endif
#ifndef CRASH
#define CRASH 0
#endif

#ifdef M_NO_GIL
#define THREADS 2
#endif
#ifndef THREADS
#define THREADS 1
#endif

#define ONE 0 /* a record of one line */
#define TWO 1 /* the first line of a record of two */
#define BODY 2 /* its second line */
#define PAD 3 /* padding up to the end of the ring */
#define LINE(position, kind) (((position) + 1) * 4 + (kind))

/* memory */
byte line[CAP];
byte TAIL, HEAD;
bool SLEEPING, bell, gone;

/* the producer's store buffer: lines, and the tail with the lines that must be there first */
byte p_lines, p_value[CAP];
bool p_tail;
byte p_tail_value, p_tail_after;
/* the consumer's store buffer */
bool c_head, c_sleeping, c_sleeping_value;
byte c_head_value;
/* the lines as the consumer's last acquire left them */
byte seen[CAP];

#define P_DRAINED (p_lines == 0 && !p_tail)
#define C_DRAINED (!c_head && !c_sleeping)
#define DRAIN(i) (p_lines & (1 << i)) -> line[i] = p_value[i]; p_value[i] = 0; p_lines = p_lines & ~(1 << i)

active proctype memory()
{
end:
    do
    :: atomic { DRAIN(0) }
    :: atomic { DRAIN(1) }
    :: atomic { DRAIN(2) }
    :: atomic { DRAIN(3) }
    :: atomic { p_tail && (p_lines & p_tail_after) == 0 -> TAIL = p_tail_value; p_tail = false; p_tail_value = 0; p_tail_after = 0 }
    :: atomic { c_head -> HEAD = c_head_value; c_head = false; c_head_value = 0 }
    :: atomic { c_sleeping -> SLEEPING = c_sleeping_value; c_sleeping = false; c_sleeping_value = false }
    od
}

#define MAYDIE if :: true :: CRASH -> goto died fi

inline store_line(position, kind)
{
    atomic { p_value[(position) % CAP] = LINE(position, kind); p_lines = p_lines | (1 << ((position) % CAP)) }
}

inline write_record()
{
    if
    :: pad > 0 -> store_line(tail, PAD)
    :: else
    fi;
    if
    :: length == 1 -> store_line(tail + pad, ONE)
    :: else -> MAYDIE; store_line(tail + pad, TWO); store_line(tail + pad + 1, BODY)
    fi
}

/* SYNC head: record space free in push (acquire load) */
#define LOAD_HEAD atomic { tail + pad + length - HEAD <= CAP -> head = HEAD }

/* what the producer's threads share */
byte tail, head, length, pad, pushed;
bool written, gil;

#if THREADS == 1
#define TAKE_GIL skip
#define DROP_GIL skip
#else
#ifdef M_NO_GIL
#define TAKE_GIL skip
#else
#define TAKE_GIL atomic { !gil -> gil = true }
#endif
#define DROP_GIL atomic { P_DRAINED -> gil = false }
#endif

active [THREADS] proctype producer()
{
    do
    :: pushed >= RECORDS -> break
    :: else ->
        MAYDIE;
        TAKE_GIL;
        if
        :: pushed >= RECORDS -> DROP_GIL; break
        :: else
        fi;
        if
        :: length = 1
        :: length = 2
        fi;
        pad = (length > CAP - tail % CAP -> CAP - tail % CAP : 0);
        if
        :: tail + pad + length - head <= CAP
        :: else ->
#ifdef M_HEAD_ACQUIRE
            if
            :: write_record(); written = true; LOAD_HEAD
            :: LOAD_HEAD
            fi
#else
            LOAD_HEAD
#endif
        fi;
        if
        :: written -> written = false
        :: else -> write_record()
        fi;
        MAYDIE;
        tail = tail + pad + length;
        /* SYNC tail: record content visible in peek (release store) */
        atomic {
            p_tail = true;
            p_tail_value = tail;
#ifdef M_TAIL_RELEASE
            p_tail_after = 0
#else
            p_tail_after = p_lines
#endif
        };
        MAYDIE;
        /* SYNC sleep: tail and sleeping cross */
#ifndef M_PRODUCER_FENCE
        P_DRAINED;
#endif
        if
        :: SLEEPING -> MAYDIE; bell = true
        :: else
        fi;
        pushed++;
        length = 0;
        pad = 0;
        DROP_GIL
    od;
    goto done;
died:
    /* What a dead process stored still reaches memory; then its connection ends, which wakes the consumer too. */
    P_DRAINED -> gone = true;
done:
    skip
}

#define LOAD_LINE(value, position) if :: value = line[(position) % CAP] :: value = seen[(position) % CAP] fi
#define STORE_HEAD atomic { c_head = true; c_head_value = next }

active proctype consumer()
{
    byte at, limit, next, value, taken;
    bool last;
    do
    :: taken == RECORDS -> break
    :: else ->
        last = gone;
        /* SYNC tail: record content visible in peek (acquire load) */
        atomic {
            limit = TAIL;
#ifndef M_TAIL_ACQUIRE
            seen[0] = line[0]; seen[1] = line[1]; seen[2] = line[2]; seen[3] = line[3]
#endif
        };
        if
        :: limit == at && last -> break
        :: limit == at && !last -> /* look again, or sleep */
            if
            :: true
            :: true ->
                atomic { c_sleeping = true; c_sleeping_value = true };
                /* SYNC sleep: tail and sleeping cross */
#ifndef M_CONSUMER_FENCE
                C_DRAINED;
#endif
                if
#ifdef M_NO_SECOND_LOOK
                :: true ->
#else
                :: TAIL == at ->
#endif
                    atomic { bell || gone -> bell = false }
#ifndef M_NO_SECOND_LOOK
                :: else
#endif
                fi;
                atomic { c_sleeping = true; c_sleeping_value = false }
            fi
        :: else ->
            LOAD_LINE(value, at);
            assert(value / 4 == at + 1);
            next = at;
            if
            :: value % 4 == PAD ->
                next = at + CAP - at % CAP;
                assert(next < limit);
                LOAD_LINE(value, next);
                assert(value / 4 == next + 1)
            :: else
            fi;
            assert(value % 4 == ONE || value % 4 == TWO);
            next = next + 1 + value % 4;
            assert(next <= limit);
            /* The payload is read after the header, from the record's last line; then the space is given back.
             * SYNC head: record space free in push (release store) */
#ifdef M_HEAD_RELEASE
            if
            :: STORE_HEAD; LOAD_LINE(value, next - 1)
            :: LOAD_LINE(value, next - 1); STORE_HEAD
            fi;
#else
            LOAD_LINE(value, next - 1);
            STORE_HEAD;
#endif
            assert(value / 4 == next && (value % 4 == ONE || value % 4 == BODY));
            at = next;
            taken++
        fi;
        value = 0;
        next = 0;
        limit = 0
    od;
    assert(CRASH || taken == RECORDS);
    assert(!CRASH || taken == RECORDS || TAIL == at)
}
